"""A production in small: API replicas and workers as processes of their own, on a real PostgreSQL and Redis."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psycopg

from tests.e2e.conftest import BIN

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
    """Everything that was started is killed by `close`."""

    def __init__(self, folder: Path, database: str, redis: str) -> None:
        self.folder, self._database = folder, database
        self.config = folder / "weft.toml"
        self.config.write_text(CONFIG.format(database=database, redis=redis))
        self._started: list[subprocess.Popen[str]] = []
        self._where = ["--data-dir", str(folder / "data"), "--config", str(self.config)]

    def serve(self, port: str = "0") -> tuple[subprocess.Popen[str], str]:
        """A replica that is ready, and its URL."""
        process = self._start("serve", "--host", "127.0.0.1", "--port", port, stdout=subprocess.PIPE)
        assert process.stdout is not None
        line = process.stdout.readline().split()
        assert line[:1] == ["ready"], self.log()
        return process, line[1]

    def worker(self, role: str) -> subprocess.Popen[str]:
        return self._start("worker", role)

    def key(self, organisation: str = "acme") -> str:
        command = [str(BIN / "weftd"), "key", "create", *self._where, "--org", organisation]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self._database.replace("+psycopg", "")) as connection:
            return connection.execute(statement).fetchall()  # type: ignore[arg-type]

    def leader(self, replicas: dict[str, str], within_s: float = 30) -> str:
        """Which of the replicas (name -> URL) leads."""
        deadline = time.monotonic() + within_s
        key = self.key("operator")
        while time.monotonic() < deadline:
            for name, url in replicas.items():
                with suppress(httpx.HTTPError):
                    reply = httpx.get(f"{url}/api/v1/weft/stats", headers={"X-API-Key": key}, timeout=5)
                    if reply.status_code == 200 and reply.json()["replica"]["leads"]:
                        return name
            time.sleep(0.1)
        raise AssertionError("nobody leads\n" + self.log())

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()

    def _start(self, *command: str, stdout: int | None = None) -> subprocess.Popen[str]:
        with (self.folder / "log").open("a") as log:
            process = subprocess.Popen(
                [str(BIN / "weftd"), command[0], *self._where, *command[1:]],
                stdout=stdout if stdout is not None else log,
                stderr=log,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        self._started.append(process)
        return process


def stop(process: subprocess.Popen[str], within_s: float = 40) -> int:
    process.send_signal(signal.SIGTERM)
    return process.wait(within_s)
