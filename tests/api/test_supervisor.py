"""Workers are kept alive, told apart from the dead, and never outlive the server."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from api.server.workers.supervisor import Backoff, Supervisor, WorkerFailed
from api.server.workers.worker_process import WorkerProgram, start_ahead
from api.server.workers.worker_programs import embedded_workers
from scheduler.links.configs import Basics, TrainerConfig
from store.settings import load_settings

#: Says hello, then leaves when it reads "leave", hangs on "hang", crashes on "crash", exits when the link closes.
WORKER = """
import os, socket, sys, time, signal
link = socket.socket(fileno=int(sys.argv[sys.argv.index("--link-fd") + 1]))
print("loading", "the model")
link.sendall(b"hello")
while word := link.recv(100):
    if word == b"leave": sys.exit(0)
    if word == b"hang": signal.signal(signal.SIGTERM, signal.SIG_IGN); print("hanging"); time.sleep(60)
    if word == b"crash": os.kill(os.getpid(), signal.SIGSEGV)
sys.exit(7)
"""


class Server:
    """The server's end of the links: what was said, and a way to talk back."""

    def __init__(self) -> None:
        self.links: list[socket.socket] = []
        self.heard: list[tuple[str, bytes]] = []
        self.closed = 0

    async def attach(self, role: str, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self.links.append(sock)
        try:
            while word := await loop.sock_recv(sock, 100):
                self.heard.append((role, word))
        finally:
            self.closed += 1
            sock.close()


def program(script: str = WORKER, role: str = "trainer") -> WorkerProgram:
    return WorkerProgram(role, [sys.executable, "-u", "-c", script])


def run(main: Callable[[Supervisor, Server], Coroutine[Any, Any, None]], *programs: WorkerProgram) -> None:
    async def body() -> None:
        server = Server()
        supervisor = Supervisor(programs or [program()], server.attach)
        supervisor.start()
        try:
            await main(supervisor, server)
        finally:
            await supervisor.stop(grace_s=0)

    asyncio.run(asyncio.wait_for(body(), 60))


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


@pytest.mark.parametrize(
    ("lives_s", "pauses_s"),
    [
        ([0] * 8, [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]),
        ([0, 0, 0, 31, 0], [0.1, 0.2, 0.4, 0.1, 0.2]),
        ([40, 40], [0.1, 0.1]),
    ],
    ids=["crash-loop", "healthy-once", "healthy"],
)
def test_backoff(lives_s: list[float], pauses_s: list[float]) -> None:
    backoff = Backoff()
    assert [backoff.pause_s(lived) for lived in lives_s] == pytest.approx(pauses_s)


def test_a_worker_attaches_with_its_first_word(capfd: pytest.CaptureFixture[str]) -> None:
    async def main(supervisor: Supervisor, server: Server) -> None:
        assert [status.attached for status in supervisor.status()] == [False, False]
        await supervisor.wait_attached()
        await until(lambda: len(server.heard) == 2)
        assert sorted(server.heard) == [("generator", b"hello"), ("trainer", b"hello")]
        assert all(status.attached and status.pid and not status.restarts for status in supervisor.status())

    run(main, program(), program(role="generator"))
    out, err = capfd.readouterr()
    assert out == ""
    assert "[trainer] loading the model\n" in err


def test_a_crashed_worker_is_restarted_and_the_reason_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async def main(supervisor: Supervisor, server: Server) -> None:
        await supervisor.wait_attached()
        first = supervisor.status()[0].pid
        server.links[0].send(b"crash")
        await until(lambda: len(server.heard) == 2)
        [status] = supervisor.status()
        assert status.pid not in (None, first)
        assert (status.restarts, status.last_exit) == (1, "was killed by SIGSEGV")
        assert server.closed == 1  # the old link had ended before the new one began

    run(main)
    assert "trainer was killed by SIGSEGV; it is started again in 0.1 s" in caplog.text


def test_kill_9_of_a_worker_restarts_it() -> None:
    async def main(supervisor: Supervisor, server: Server) -> None:
        await supervisor.wait_attached()
        pid = supervisor.status()[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: len(server.heard) == 2)

    run(main)


def test_a_worker_that_drains_is_not_restarted() -> None:
    async def main(supervisor: Supervisor, server: Server) -> None:
        await supervisor.wait_attached()
        supervisor.retire()
        server.links[0].send(b"leave")
        await supervisor.stop(grace_s=20)
        [status] = supervisor.status()
        assert (status.pid, status.restarts, status.last_exit) == (None, 0, "exited with code 0")

    run(main)


def test_a_worker_that_takes_long_to_exit_after_its_link_has_closed_is_left_in_peace() -> None:
    slow = WORKER.replace("sys.exit(0)", "link.close(); time.sleep(0.5); sys.exit(0)")

    async def main(supervisor: Supervisor, server: Server) -> None:
        await supervisor.wait_attached()
        supervisor.retire()
        server.links[0].send(b"leave")
        await until(lambda: not supervisor.status()[0].attached)
        await supervisor.stop(grace_s=20)
        assert supervisor.status()[0].last_exit == "exited with code 0"

    run(main, program(slow))


def test_a_worker_that_drains_has_all_the_time_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when its link is closed already: it may be writing, on a machine that is busy."""
    monkeypatch.setattr("api.server.workers.supervisor.LINGER_S", 0.1)
    slow = WORKER.replace("sys.exit(0)", "link.close(); time.sleep(1.5); sys.exit(0)")

    async def main(supervisor: Supervisor, server: Server) -> None:
        await supervisor.wait_attached()
        supervisor.retire()
        server.links[0].send(b"leave")
        await supervisor.stop(grace_s=20)
        assert supervisor.status()[0].last_exit == "exited with code 0"

    run(main, program(slow))


def standing_by(script: str = WORKER) -> WorkerProgram:
    """One that can be started ahead: it waits for its config before it says anything."""
    script = script.replace('print("loading"', 'assert link.recv(1000), "no config"; print("loading"')
    config = TrainerConfig(Basics("/data", {"m": "/models/m"}))
    return WorkerProgram("trainer", [sys.executable, "-u", "-c", script], config=config, stands_by=True)


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE}


def test_a_successor_stands_by_and_is_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.server.workers.supervisor.STANDBY_AFTER_S", 0)
    before = children()

    async def main(supervisor: Supervisor, server: Server) -> None:
        await supervisor.wait_attached()
        for life in range(3):
            await until(lambda: len(children() - before) == 2)
            [status] = supervisor.status()
            [successor] = children() - before - {status.pid}
            assert len(server.heard) == life + 1  # the one that waits says nothing
            server.links[-1].send(b"crash")
            await until(lambda life=life: len(server.heard) == life + 2)
            assert supervisor.status()[0].pid == successor
        supervisor.retire()
        server.links[-1].send(b"leave")
        await supervisor.stop(grace_s=20)
        assert children() == before

    run(main, standing_by())


def test_one_that_died_while_it_stood_by_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.server.workers.supervisor.STANDBY_AFTER_S", 0)
    before = children()

    async def main(supervisor: Supervisor, server: Server) -> None:
        await supervisor.wait_attached()
        await until(lambda: len(children() - before) == 2)
        [successor] = children() - before - {supervisor.status()[0].pid}
        os.kill(successor, signal.SIGKILL)
        await until(lambda: successor not in children())
        server.links[-1].send(b"crash")
        await until(lambda: len(server.heard) == 2)
        assert supervisor.status()[0].restarts == 1

    run(main, standing_by())


def test_a_worker_that_was_started_ahead_waits_for_the_start() -> None:
    before = children()
    programs = [standing_by(), program(role="generator")]
    ahead = start_ahead(programs)
    assert set(ahead) == {"trainer"}
    [waiting] = children() - before

    async def main() -> None:
        server = Server()
        supervisor = Supervisor(programs, server.attach, ahead)
        assert ahead == {}
        supervisor.start()
        try:
            await supervisor.wait_attached()
            trainer, generator = supervisor.status()
            assert trainer.pid == waiting != generator.pid
        finally:
            await supervisor.stop(grace_s=0)

    asyncio.run(asyncio.wait_for(main(), 60))
    assert children() == before


def test_one_that_stands_by_leaves_when_it_is_not_wanted() -> None:
    [process] = start_ahead([standing_by()]).values()
    assert not gone(process.pid)
    process.discard()
    assert gone(process.pid)


def test_a_real_trainer_stands_by_without_a_model_and_ends_with_the_server(tmp_path: Path) -> None:
    settings = load_settings(None, data_dir=tmp_path)
    trainer, _ = embedded_workers(settings, {"m": Path("/nonexistent")})
    theirs, ours = socket.socketpair()
    process = subprocess.Popen(
        [*trainer.command, "--link-fd", "0"],
        stdin=theirs.fileno(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **trainer.environment},
    )
    theirs.close()
    ours.close()  # nobody will ever say that its turn has come
    out, _ = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, b"")


def test_a_worker_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("api.server.workers.supervisor.TERMINATE_S", 0.2)

    async def main(supervisor: Supervisor, server: Server) -> None:
        await supervisor.wait_attached()
        server.links[0].send(b"hang")
        await asyncio.sleep(0.3)
        await supervisor.stop(grace_s=0.1)
        assert supervisor.status()[0].last_exit == "was killed by SIGKILL"

    run(main)


def test_a_worker_that_is_still_loading_does_not_hold_up_the_stop() -> None:
    async def main(supervisor: Supervisor, server: Server) -> None:
        await until(lambda: supervisor.status()[0].pid is not None)
        started = time.monotonic()
        await supervisor.stop(grace_s=30)
        assert time.monotonic() - started < 10
        assert server.heard == []

    run(main, program("import time; time.sleep(60)"))


def test_a_worker_that_never_comes_up_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(supervisor: Supervisor, server: Server) -> None:
        with pytest.raises(WorkerFailed, match=r"the trainer did not come up in 2 starts: it exited with code 3"):
            await supervisor.wait_attached()

    monkeypatch.setattr("api.server.workers.supervisor.START_ATTEMPTS", 2)
    run(main, program("raise SystemExit(3)"))


def test_a_program_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(supervisor: Supervisor, server: Server) -> None:
        with pytest.raises(WorkerFailed, match=r"could not be started: .*No such file"):
            await supervisor.wait_attached()

    monkeypatch.setattr("api.server.workers.supervisor.START_ATTEMPTS", 2)
    run(main, WorkerProgram("trainer", ["/nonexistent"]))


def test_a_link_that_fails_costs_the_worker_its_life_and_not_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.server.workers.supervisor.LINGER_S", 0.1)

    async def main(supervisor: Supervisor, server: Server) -> None:
        await until(lambda: len(server.heard) == 1)
        assert supervisor.status()[0].restarts == 1

    attach = Server.attach

    async def fail_once(server: Server, role: str, sock: socket.socket) -> None:
        if not server.links:
            server.links.append(sock)
            raise ValueError("not a message")
        await attach(server, role, sock)

    monkeypatch.setattr(Server, "attach", fail_once)
    run(main)


PARENT = f"""
import asyncio, sys
from api.server.workers.supervisor import Supervisor
from api.server.workers.worker_process import WorkerProgram
async def attach(role, sock):
    await asyncio.sleep(60)
async def main():
    worker = "import sys,socket,time; s=socket.socket(fileno=int(sys.argv[2])); s.send(b'x'); time.sleep(60)"
    supervisor = Supervisor([WorkerProgram("trainer", [{sys.executable!r}, "-c", worker])], attach)
    supervisor.start()
    await supervisor.wait_attached()
    print(supervisor.status()[0].pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a worker ends when its link closes")
def test_workers_die_with_a_server_that_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    assert not gone(worker)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while not gone(worker) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gone(worker)
