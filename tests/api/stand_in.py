"""The command weftd in front of an app that is a stand-in with stub workers: for tests of the command alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.forked import Forked

ROOT = Path(__file__).resolve().parents[2]

#: A worker that says hello after a while and leaves when told. `MODE` is what the test wants to go wrong, or a file
#: that the server waits for before it is built.
STAND_IN = """
import asyncio, os, sys, time, types
from contextlib import asynccontextmanager
from fastapi import FastAPI
from api.server.workers import supervisor as s
s.START_ATTEMPTS = 2
from api.server.workers.nursery import Nursery
Nursery.ahead = lambda nursery: None  # the real ones
mode = os.environ.get("MODE", "")
WORKER = '''
import socket, sys, time
link = socket.socket(fileno=int(sys.argv[-1]))
time.sleep(0.3)
link.sendall(b"hello")
link.recv(10)
'''
if mode == "worker":
    WORKER = "raise SystemExit(9)"

def create_app(settings, cards, database, blobs, prices):
    while mode and not mode[:1].isalpha() and not os.path.exists(mode):
        time.sleep(0.05)
    links = []
    async def attach(role, sock):
        links.append(sock)
        while await asyncio.get_running_loop().sock_recv(sock, 10):
            pass
        sock.close()
    @asynccontextmanager
    async def lifespan(app):
        if mode == "app":
            raise ValueError("the app cannot start")
        workers = [s.WorkerProgram(role, [sys.executable, "-c", WORKER]) for role in ("trainer", "generator")]
        supervisor = s.Supervisor(workers, attach)
        app.state.ready = supervisor.wait_attached
        supervisor.start()
        yield
        supervisor.retire()
        for link in links:
            link.send(b"bye")
        await supervisor.stop(settings.drain_s)
        print("drained", [w.last_exit for w in supervisor.status()], file=sys.stderr)
    app = FastAPI(lifespan=lifespan)
    poll = asyncio.Event()
    app.state.stopping = poll.set
    @app.get("/models")
    async def models():
        return sorted(cards)
    @app.get("/poll")
    async def long_poll():
        await poll.wait()
        return "try again"
    return app

app = types.ModuleType("api.server.app")
app.create_app = create_app
sys.modules["api.server.app"] = app
from api.cli import main
main()
"""


def weftd(*arguments: str, mode: str = "") -> Forked:
    """Run `weftd` in a forked process; its start as a program is tested by `operators_weftd`."""
    return Forked("-c", STAND_IN, *arguments, env={**os.environ, "MODE": mode})


def operators_weftd(*arguments: str, mode: str = "") -> subprocess.Popen[str]:
    """Run `weftd` as a process that imports everything by itself."""
    return subprocess.Popen(
        [sys.executable, "-c", STAND_IN, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "MODE": mode},
        cwd=ROOT,
    )


Process = Forked | subprocess.Popen[str]
Start = Callable[..., Process]


@contextmanager
def serving(data_dir: Path, *arguments: str, start: Start = weftd) -> Iterator[tuple[Process, str]]:
    process = start("serve", "--data-dir", str(data_dir), "--port", "0", *arguments)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert re.fullmatch(r"ready http://127\.0\.0\.1:[1-9]\d*\n", line), (
            line,
            process.stderr and process.stderr.read(),
        )
        yield process, line.split()[1]
    finally:
        process.kill()
        process.wait()


def refused(*arguments: str, mode: str = "") -> str:
    """The one line that a refused command prints."""
    process = weftd(*arguments, mode=mode)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, ""), err
    return err
