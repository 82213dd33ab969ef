"""The servers of the end-to-end tests, each a real `weftd` as a process. It, and what forks its workers, are forked
from one that has imported all (`tests.forked`). As an operator starts it: tests/api/test_serve_cli.py, tests/deploy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import weft

from store.database.db import Database
from tests.forked import Forked, run_forked
from tests.keys import create_key
from tests.servers import OwnRedis
from tests.waiting import until

# Before the official SDK is imported: it shall fetch nothing and report nothing.
os.environ.update(HF_HUB_OFFLINE="1", TINKER_TELEMETRY="0")

BIN = Path(sys.executable).parent
BASE_MODEL = "weft/tiny-moe"


class Weftd:
    """One server on one data folder; may be stopped, killed and started again."""

    def __init__(self, data_dir: Path, *options: str) -> None:
        self.data_dir = data_dir
        self.options = options
        self.url = ""
        self._port = "0"
        self._keys: dict[str, str] = {}
        data_dir.mkdir(parents=True, exist_ok=True)
        SERVERS.append(self)

    def start(self) -> Weftd:
        where = ["--host", "127.0.0.1", "--port", self._port, "--data-dir", str(self.data_dir)]
        log = self.data_dir / "stderr.log"
        self.process = Forked("-m", "weft_server", "serve", *where, *self.options, log=log)
        line = self.process.stdout.readline().split()
        assert line[:1] == ["ready"], self.log()
        self.url = line[1]
        self._port = self.url.rsplit(":", 1)[1]  # the same address after a restart
        return self

    def stop(self, timeout_s: float = 120) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def worker(self, role: str) -> psutil.Process:
        """The process of the present `trainer` or `generator`; waits until there is one."""
        return until(lambda: self.workers(role), said=self.log)[0]

    def workers(self, role: str) -> list[psutil.Process]:
        """All processes of that role."""
        agent = ["pt_elastic"] if role == "trainer" else []  # what torchrun names itself: the trainer of several ranks
        return [child for nursery in self.nurseries() for child in named(nursery, f"weft-{role}", *agent)]

    def nurseries(self) -> list[psutil.Process]:
        """The processes that fork the workers: one, once the server starts."""
        return named(psutil.Process(self.process.pid), "weft-nursery")

    def key(self, organisation: str = "acme") -> str:
        if organisation not in self._keys:
            database = Database(f"sqlite:///{self.data_dir}/weft.db")  # `weftd key create` takes a second
            self._keys[organisation] = database.write_now(lambda session: create_key(session, organisation))
            database.close()
        return self._keys[organisation]

    def log(self) -> str:
        return (self.data_dir / "stderr.log").read_text()


def named(parent: psutil.Process, *names: str) -> list[psutil.Process]:
    """The server's child processes that have one of these names."""
    found = []
    for child in parent.children():
        with suppress(psutil.NoSuchProcess):  # it has died since it was listed
            if child.name() in names and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


#: All servers that were made, for the report of a failed test.
SERVERS: list[Weftd] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to the report of a failed test what its servers and their workers have logged."""
    report = yield
    for server in SERVERS if report.failed else ():
        with suppress(FileNotFoundError):
            if (server.data_dir / "stderr.log").stat().st_mtime >= call.start:
                report.sections.append((f"Log of {server.url}", "\n".join(server.log().splitlines()[-80:])))
    return report


def weftd_command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `weftd` with these arguments in a forked process; its start as a program is tested elsewhere."""
    return run_forked("-m", "weft_server", *map(str, arguments))


def tinker_command(server: Weftd, *arguments: str, key: str | None = None) -> subprocess.CompletedProcess[str]:
    """Tinker's command line, in a process of its own: within one process all of its clients share one event loop."""
    environment = {**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": key or server.key()}
    done = run_forked("-m", "tinker.cli", *arguments, env=environment)
    if done.returncode == -signal.SIGABRT:  # Tinker's threads can fail at its exit on a busy machine
        done = run_forked("-m", "tinker.cli", *arguments, env=environment)
    return done


@pytest.fixture(scope="session")
def weftd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weftd]:
    """One server for all tests that do not harm it."""
    server = Weftd(tmp_path_factory.mktemp("weftd")).start()
    yield server
    assert server.stop() == 0, server.log()


@pytest.fixture
def service(weftd: Weftd, request: pytest.FixtureRequest) -> Iterator[weft.ServiceClient]:
    """Our client, as an organisation of the file's own."""
    with weft.ServiceClient(base_url=weftd.url, api_key=weftd.key(request.path.stem)) as service:
        yield service


@pytest.fixture
def own_weftd(tmp_path: Path) -> Iterator[Callable[..., Weftd]]:
    """Makes servers for one test alone, which may kill them."""
    started: list[Weftd] = []

    def start(*options: str) -> Weftd:
        server = Weftd(tmp_path / f"data{len(started)}", *options)
        started.append(server)
        return server.start()

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def official(weftd: Weftd) -> Callable[..., Any]:
    """A `tinker.ServiceClient` of one organisation."""
    import tinker

    return lambda organisation="acme": tinker.ServiceClient(base_url=weftd.url, api_key=weftd.key(organisation))


@pytest.fixture
def own_redis() -> Iterator[OwnRedis]:
    own = OwnRedis()
    yield own
    own.stop()
