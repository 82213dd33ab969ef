"""The service that is harmed: embedded, one `weftd` with its two workers; or a production in small, API replicas and
workers as processes of their own on a real PostgreSQL, Redis and object store. It may be of another checkout
(`tree`)."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import httpx
import psutil
import psycopg

from tests.servers import OwnRedis, OwnStore, PostgresServer, postgres_server

HERE = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
#: The longest wait, more than anything takes on any machine.
PATIENCE_S = 240.0

CONFIG = """
[trainer]
threads = 1
[generator]
threads = 1
slots = 8
"""
SHARED = """
database_url = "{database}"
redis_url = "{redis}"
"""


class Service(Protocol):
    """What load and kills need of a service. `kinds` are the ways to harm it, by name; each returns when all that it
    killed has been started again."""

    kinds: dict[str, Callable[[], None]]

    def url(self, client: int) -> str:
        """The address for the client of this number."""

    def key(self, organisation: str) -> str: ...

    def count(self, query: str) -> int:
        """The single number that a query of the database returns."""

    def log(self) -> str:
        """Everything that an operator can read, from all processes."""


class Programs:
    """Processes of one checkout, on one data folder; with a `store`, each on a folder of its own."""

    def __init__(self, tree: Path, folder: Path, config: str, store: OwnStore | None = None) -> None:
        self.folder, self.data, self._own_folders = folder, folder / "data", store is not None
        self.data.mkdir(parents=True, exist_ok=True)
        (folder / "weft.toml").write_text(config)
        self._environment = os.environ | {"PYTHONPATH": f"{tree}:{tree / 'client_sdk'}"}
        if store is not None:
            self._environment |= store.environment | {"WEFT_BLOB_URL": store.url, "WEFT_SERVER_SECRET": "of all" * 8}
        self._started: list[subprocess.Popen[str]] = []
        self._keys: dict[str, str] = {}

    def start(self, *command: str) -> subprocess.Popen[str]:
        with (self.folder / "log").open("a") as log:
            process = subprocess.Popen(
                [str(BIN / "weftd"), command[0], *self._where(len(self._started)), *command[1:]],
                stdout=subprocess.PIPE if command[0] == "serve" else log,
                stderr=log,
                text=True,
                env=self._environment,
                cwd="/",
            )
        self._started.append(process)
        return process

    def serve(self, port: int = 0) -> tuple[subprocess.Popen[str], str]:
        """Start a server; returns it, once it says that it is ready, with its address."""
        process = self.start("serve", "--host", "127.0.0.1", "--port", str(port))
        assert process.stdout is not None
        hangs = threading.Timer(PATIENCE_S, process.kill)
        hangs.start()
        line = process.stdout.readline().split()
        hangs.cancel()
        if line[:1] != ["ready"]:
            raise DidNotStart(self.log())
        return process, line[1]

    def run(self, *command: str) -> str:
        ran = subprocess.run(
            [str(BIN / "weftd"), *command, *self._where()],
            env=self._environment,
            cwd="/",
            capture_output=True,
            text=True,
        )
        if ran.returncode:
            raise RuntimeError(f"weftd {' '.join(command)}: {ran.stderr}")
        return ran.stdout.strip()

    def _where(self, number: int | None = None) -> list[str]:
        data = self.folder / f"data-{number}" if self._own_folders and number is not None else self.data
        return ["--data-dir", str(data), "--config", str(self.folder / "weft.toml")]

    def key(self, organisation: str) -> str:
        if organisation not in self._keys:
            self._keys[organisation] = self.run("key", "create", "--org", organisation)
        return self._keys[organisation]

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()


class DidNotStart(RuntimeError):
    """A server ended before it was ready; the message is everything that it wrote."""


class Embedded:
    def __init__(self, programs: Programs) -> None:
        self.programs, self.data = programs, programs.data
        self.process, self._url = programs.serve()
        self.kinds = {
            "trainer, kill -9": lambda: self.worker("trainer").kill(),
            "generator, kill -9": lambda: self.worker("generator").kill(),
            "server, kill -9, started again": self._kill_and_start,
            "server, SIGTERM, started again": self._stop_and_start,
        }
        self.key, self.log = programs.key, programs.log

    def url(self, client: int) -> str:
        return self._url

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def start(self) -> None:
        """Start the server, on the same address."""
        self.process, self._url = self.programs.serve(int(self._url.rsplit(":", 1)[1]))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def worker(self, role: str) -> psutil.Process:
        """The process that works as `trainer` or `generator` now, as the server's log says."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for pid in re.findall(rf"{role} attached \(pid (\d+)\)", self.log())[-1:]:
                with suppress(psutil.NoSuchProcess):
                    process = psutil.Process(int(pid))
                    ours = psutil.Process(self.process.pid) in process.parents()
                    if ours and process.status() != psutil.STATUS_ZOMBIE:
                        return process
            time.sleep(0.02)
        raise RuntimeError(f"there is no {role}\n{self.log()}")

    def count(self, query: str) -> int:
        return int(self.rows(query)[0][0])

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(f"file:{self.data / 'weft.db'}?mode=ro", uri=True)) as database:
            return database.execute(query).fetchall()

    def _kill_and_start(self) -> None:
        self.kill()
        self.start()

    def _stop_and_start(self) -> None:
        self.stop()
        self.start()


class Production:
    """Two replicas, a trainer that works and one that stands by, two generators. Clients stay with the replica that
    they came to: half of them with each."""

    def __init__(
        self, programs: Programs, postgres: PostgresServer, database: str, redis: OwnRedis, store: OwnStore
    ) -> None:
        self.programs, self._postgres, self._database = programs, postgres, database
        self._redis, self._store = redis, store
        programs.run("migrate")
        self._trainers, self._generators = ([programs.start("worker", role) for _ in range(2)] for role in WORKERS)
        self._replicas = {url: process for process, url in (programs.serve() for _ in range(2))}
        self.kinds = {
            "replica that leads, kill -9, started again": lambda: self._replace_replica(leads=True),
            "other replica, kill -9, started again": lambda: self._replace_replica(leads=False),
            "trainer that works, kill -9, started again": lambda: self._replace(self._trainers, "trainer"),
            "generator, kill -9, started again": lambda: self._replace(self._generators, "generator"),
            "Redis, emptied": self._empty_redis,
            "PostgreSQL, stopped at once and started": self._restart_postgres,
            f"object store, away for {AWAY_S:.0f} s": self._lose_the_store,
        }
        self.key, self.log = programs.key, programs.log

    def url(self, client: int) -> str:
        return list(self._replicas)[client % len(self._replicas)]

    def count(self, query: str) -> int:
        address = self._postgres.url(self._database).replace("+psycopg", "")
        with psycopg.connect(address) as connection:
            (found,) = connection.execute(query).fetchone()
        return int(found)

    def _leader(self) -> str:
        headers = {"X-API-Key": self.key("operator")}
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for url in self._replicas:
                with suppress(httpx.HTTPError):
                    reply = httpx.get(f"{url}/api/v1/weft/stats", headers=headers, timeout=5)
                    if reply.status_code == 200 and reply.json()["replica"]["leads"]:
                        return url
            time.sleep(0.1)
        raise RuntimeError(f"nobody leads\n{self.log()}")

    def _replace_replica(self, *, leads: bool) -> None:
        leader = self._leader()
        url = leader if leads else next(url for url in self._replicas if url != leader)
        self._replicas[url].kill()
        self._replicas[url].wait()
        self._replicas[url], _ = self.programs.serve(int(url.rsplit(":", 1)[1]))

    def _replace(self, processes: list[subprocess.Popen[str]], role: str) -> None:
        busiest = busiest_of(processes)
        busiest.kill()
        busiest.wait()
        processes[processes.index(busiest)] = self.programs.start("worker", role)

    def _empty_redis(self) -> None:
        self._redis.stop()
        self._redis.start()

    def _restart_postgres(self) -> None:
        self._postgres.stop()
        self._postgres.start()

    def _lose_the_store(self) -> None:
        self._store.stop()
        time.sleep(AWAY_S)
        self._store.start()


#: How long the object store is away.
AWAY_S = 40.0
WORKERS = ("trainer", "generator")


def busiest_of(processes: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
    """The process that computes: only one of the trainers does."""

    def used(process: subprocess.Popen[str]) -> float:
        times = psutil.Process(process.pid).cpu_times()
        return times.user + times.system

    before = [used(process) for process in processes]
    time.sleep(0.5)
    after = [used(process) for process in processes]
    return max(zip(processes, before, after, strict=True), key=lambda each: each[2] - each[1])[0]


@contextmanager
def embedded(tree: Path, folder: Path) -> Iterator[Embedded]:
    programs = Programs(tree, folder, CONFIG)
    with ExitStack() as stack:
        stack.callback(programs.close)
        yield Embedded(programs)


@contextmanager
def production(tree: Path, folder: Path) -> Iterator[Production]:
    with ExitStack() as stack:
        postgres = stack.enter_context(postgres_server())
        redis = OwnRedis()
        stack.callback(redis.stop)
        database = postgres.create()
        # Unlike in tests, what PostgreSQL has committed survives its own death.
        postgres.execute(f'ALTER DATABASE "{database}" SET synchronous_commit = on')
        config = SHARED.format(database=postgres.url(database), redis=redis.url) + CONFIG
        store = OwnStore(folder / "objects")
        stack.callback(store.stop)
        programs = Programs(tree, folder, config, store)
        stack.callback(programs.close)
        yield Production(programs, postgres, database, redis, store)
