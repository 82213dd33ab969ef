"""Real servers for tests: PostgreSQL and Redis, started once for a test run on free ports of the loopback, in a
temporary folder, and gone with it, even when it is killed. Where a program is not installed its tests are skipped;
under CI they fail."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psycopg
import pytest
import redis

#: Below the ports that clients get: so no connection takes one of these before its server does.
PORTS = range(10_000, 32_768)


def free_port() -> int:
    while True:
        port = secrets.choice(PORTS)
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


@contextmanager
def at_end(script: str, *arguments: str | Path) -> Iterator[None]:
    """Run a shell script after the block, and also when this process is killed within it: a shell in a session of its
    own, where no signal to this process's group finds it, waits for the end of a pipe that nobody else holds."""
    command = ["sh", "-c", f"cat; {script}", "sh", *map(str, arguments)]
    nothing = subprocess.DEVNULL
    guard = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, cwd="/", start_new_session=True
    )
    assert guard.stdin is not None
    try:
        yield
    finally:
        guard.stdin.close()
        guard.wait()


class PostgresServer:
    """A throw-away PostgreSQL cluster. `superuser` owns everything and is not bound by row-level security."""

    superuser = "weft_owner"

    def __init__(self, port: int, start: Callable[[], None], stop: Callable[[], None]) -> None:
        self.port = port
        self.start = start
        self.stop = stop  # as in a crash: clients are cut off, and nothing is written any more

    def url(self, name: str, user: str | None = None) -> str:
        return f"postgresql+psycopg://{user or self.superuser}@127.0.0.1:{self.port}/{name}"

    def create(self, template: str = "template1") -> str:
        """Make a new database; returns its name."""
        name = f"weft_{uuid.uuid4().hex[:12]}"
        with self._connect() as connection:
            # Before PostgreSQL 15 there is no other strategy. The other one writes each page twice.
            strategy = "STRATEGY FILE_COPY" if connection.info.server_version >= 150_000 else ""
            connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}" {strategy}')  # type: ignore[arg-type]
        return name

    def drop(self, name: str) -> None:
        self.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def execute(self, statement: str, name: str = "postgres") -> None:
        with self._connect(name) as connection:
            connection.execute(statement)  # type: ignore[arg-type]

    def _connect(self, name: str = "postgres") -> psycopg.Connection[tuple[object, ...]]:
        address = f"host=127.0.0.1 port={self.port} user={self.superuser} dbname={name}"
        return psycopg.connect(address, autocommit=True)


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    bin_dir = _postgres_programs()
    port, user = free_port(), _unprivileged_user()
    folder = Path(tempfile.mkdtemp(prefix="weft-postgres-", dir=_in_memory()))
    data = folder / "data"
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off"
    options += " -c synchronous_commit=off -c full_page_writes=off -c max_connections=300"
    options += " -c autovacuum=off -c max_wal_size=64MB"  # a test's database is small and soon gone
    pg_ctl = (bin_dir / "pg_ctl", "-D", data, "-w", "-t", "60")
    stopping = _as_user(user, *pg_ctl, "-m", "immediate", "stop")

    def start() -> None:
        _run(_as_user(user, *pg_ctl, "-l", folder / "log", "-o", options, "start"))

    with at_end('folder=$1; shift; "$@"; rm -rf "$folder"', folder, *stopping):
        if user is not None:
            shutil.chown(folder, user)
        initdb = (bin_dir / "initdb", "-D", data, "-U", PostgresServer.superuser, "--auth=trust", "-E", "UTF8", "-N")
        _run(_as_user(user, *initdb))
        start()
        yield PostgresServer(port, start, lambda: _run(stopping))


@contextmanager
def redis_server(*options: str, port: int | None = None) -> Iterator[str]:
    """A Redis that keeps nothing on disk; its URL."""
    program = shutil.which("redis-server") or _missing("redis-server")
    port = port or free_port()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/")
    with at_end('kill -9 "$1"', str(process.pid)):
        _wait_for_redis(port, process)
        yield f"redis://127.0.0.1:{port}/0"
    process.wait()


class OwnRedis:
    """A Redis for one test alone that goes away, and comes back empty on its port."""

    def __init__(self) -> None:
        self.port, self._running = free_port(), ExitStack()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self) -> None:
        self._running.enter_context(redis_server(port=self.port))

    def stop(self) -> None:
        """Stop it as a crash would."""
        self._running.close()


class OwnStore:
    """An S3-compatible object store of a test's own (rclone's), in a folder: it may go away and come back with all that
    it had. `environment` has its address and credentials; `url` a place in its one bucket."""

    url = "s3://weft-test/a/prefix"

    def __init__(self, folder: Path) -> None:
        self._folder, self.port, self._running = folder, free_port(), ExitStack()
        (folder / "weft-test").mkdir(parents=True)
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "test-key-of-weft",
            "AWS_SECRET_ACCESS_KEY": "test-secret-of-weft",
            "AWS_REGION": "us-east-1",
        }
        self.start()

    def start(self) -> None:
        program = shutil.which("rclone", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        key = f"{self.environment['AWS_ACCESS_KEY_ID']},{self.environment['AWS_SECRET_ACCESS_KEY']}"
        command = [program or _missing("rclone"), "serve", "s3", "--auth-key", key, "--addr", f"127.0.0.1:{self.port}"]
        command += ["--config", "/dev/null", "--no-cleanup", str(self._folder)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/")
        self._running.callback(process.wait)
        self._running.enter_context(at_end('kill -9 "$1"', str(process.pid)))
        deadline = time.monotonic() + 30
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.02)
        raise RuntimeError("rclone did not come up")

    def stop(self) -> None:
        """Stop it as a crash would."""
        self._running.close()


def _wait_for_redis(port: int, process: subprocess.Popen[bytes]) -> None:
    client = redis.Redis(port=port, socket_connect_timeout=1)
    deadline = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < deadline:
        try:
            client.ping()
            return
        except redis.RedisError:
            time.sleep(0.02)
        finally:
            client.close()
    raise RuntimeError("redis-server did not come up")


def _postgres_programs() -> Path:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if not found and (program := shutil.which("initdb")) is not None:
        found = [Path(program)]
    return found[-1].parent if found else Path(_missing("postgresql"))


def _in_memory() -> str | None:
    """A database is three hundred files: to make and drop one takes a disk's file system ten times the processor time.
    A server's folder has some 100 MB. Where there is little memory for files, as in a container: the usual place."""
    memory = Path("/dev/shm")
    return str(memory) if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 4 << 30 else None


def _missing(package: str) -> str:
    message = f"{package} is not installed (apt-get install {package})"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


def _unprivileged_user() -> str | None:
    """PostgreSQL refuses to run as root."""
    return "nobody" if os.geteuid() == 0 else None


def _as_user(user: str | None, *command: str | Path) -> list[str]:
    prefix = ["setpriv", "--reuid", user, "--regid", "nogroup", "--clear-groups"] if user is not None else []
    return [*prefix, *map(str, command)]


def _run(command: list[str]) -> None:
    ran = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd="/")
    if ran.returncode:
        raise RuntimeError(f"{' '.join(command)}: {ran.stderr}")
