"""A small production: API replicas and workers as processes of their own, on a real PostgreSQL and Redis, with either
one shared folder or a real object store."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psycopg
from click.testing import CliRunner

from api.cli import weftd
from tests.forked import Forked
from tests.servers import OwnStore, PostgresServer

CONFIG = """
database_url = "{database}"
redis_url = "{redis}"
long_poll_s = 5
drain_s = 15
[trainer]
threads = 1
[generator]
threads = 1
slots = 4
[limits]
max_queued_ops_per_org = 500
"""


class Production:
    """The processes of a production, until `close` kills them. With a `store` each has a data folder of its own."""

    def __init__(self, folder: Path, database: str, redis: str, store: OwnStore | None = None) -> None:
        self.folder, self._database = folder, database
        self._store, self._numbers = store, itertools.count()
        self.config = folder / "weft.toml"
        links = "blob_links = true\n" if store else ""
        self.config.write_text(links + CONFIG.format(database=database, redis=redis))
        self._started: list[Forked] = []
        self._where = self._places(self.config)

    def serve(self, replicas: int) -> dict[str, Forked]:
        """Start replicas and wait until they are ready. Returns their URLs."""
        started = [self._serve() for _ in range(replicas)]
        return {self._ready(process): process for process in started}

    def _ready(self, process: Forked) -> str:
        line = process.stdout.readline().split()
        assert line[:1] == ["ready"], self.log()
        return line[1]

    def worker(self, role: str) -> Forked:
        return self._start("worker", role)

    def ranks(self) -> Forked:
        """Start a trainer of two processes."""
        config = self.folder / "ranks.toml"
        config.write_text(self.config.read_text().replace("[trainer]", "[trainer]\nranks = 2"))
        return self._start("worker", "trainer", where=self._places(config))

    def vllm(self) -> Forked:
        """Start a generator that runs vLLM."""
        config = self.folder / "vllm.toml"
        kind = '[generator]\nengine = "vllm"\nvllm = { max_adapters = 4, max_rank = 8 }'
        config.write_text(self.config.read_text().replace("[generator]", kind))
        return self._start("worker", "generator", where=self._places(config))

    def key(self, organisation: str = "acme") -> str:
        places = ["--data-dir", str(self.folder / "data"), *self._where]
        made = CliRunner().invoke(weftd, ["key", "create", *places, "--org", organisation], catch_exceptions=False)
        assert made.exit_code == 0, made.output
        return made.stdout.strip()

    def query(self, statement: str, *values: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self._database.replace("+psycopg", "")) as connection:
            return connection.execute(statement, values).fetchall()  # type: ignore[arg-type]

    def leader(self, urls: Iterable[str], within_s: float = 60) -> str:
        """The replica that leads."""
        deadline = time.monotonic() + within_s
        headers = {"X-API-Key": self.key("operator")}
        while time.monotonic() < deadline:
            for url in urls:
                with suppress(httpx.HTTPError):
                    reply = httpx.get(f"{url}/api/v1/weft/stats", headers=headers, timeout=5)
                    if reply.status_code == 200 and reply.json()["replica"]["leads"]:
                        return url
            time.sleep(0.1)
        raise AssertionError("nobody leads\n" + self.log())

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()

    def _places(self, config: Path) -> list[str]:
        return ["--config", str(config)]

    def _environment(self) -> dict[str, str]:
        if self._store is None:
            return {}
        secret = {"WEFT_BLOB_URL": self._store.url, "WEFT_SERVER_SECRET": "of all replicas, and 32 letters long"}
        return self._store.environment | secret

    def _serve(self) -> Forked:
        data, log = self._data(), self.folder / "log"
        arguments = ["serve", "--data-dir", data, *self._where, "--host", "127.0.0.1", "--port", "0"]
        process = Forked("-m", "weft_server", *arguments, env=os.environ | self._environment(), log=log)
        self._started.append(process)
        return process

    def program(self, *command: str, where: list[str] | None = None) -> tuple[list[str], dict[str, str]]:
        """The command line and the environment of such a process."""
        arguments = [command[0], "--data-dir", self._data(), *(where or self._where), *command[1:]]
        return arguments, os.environ | {"OMP_NUM_THREADS": "1"} | self._environment()

    def _start(self, *command: str, where: list[str] | None = None) -> Forked:
        arguments, environment = self.program(*command, where=where)
        process = Forked("-m", "weft_server", *arguments, env=environment, log=self.folder / "log")
        self._started.append(process)
        return process

    def _data(self) -> str:
        return str(self.folder / (f"data-{next(self._numbers)}" if self._store else "data"))


@contextmanager
def production_of(
    folder: Path, postgres: PostgresServer, template: str, redis: str, store: OwnStore | None = None
) -> Iterator[Production]:
    """A production on a database of its own."""
    name = postgres.create(template)
    made = Production(folder, postgres.url(name), redis, store)
    try:
        yield made
    finally:
        made.close()
        postgres.drop(name)


def stop(process: Forked, within_s: float = 40) -> int:
    process.send_signal(signal.SIGTERM)
    return process.wait(within_s)
