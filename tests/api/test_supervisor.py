"""The supervisor restarts dead workers, leaves busy ones alone, and lets no worker outlive the server."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from api.server.workers import supervisor as supervising
from api.server.workers.nursery import Nursery
from api.server.workers.supervisor import Backoff, Supervisor, WorkerFailed
from api.server.workers.worker_process import WorkerProgram
from scheduler.links.configs import OF_ANOTHER_VERSION
from tests.waiting import until, until_async

#: A worker that says hello, leaves on "leave", hangs on "hang", crashes on "crash", and exits when the link closes.
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
    """The server's end of the links: keeps the messages, and can answer."""

    def __init__(self) -> None:
        self.links: list[socket.socket] = []
        self.heard: list[tuple[str, bytes]] = []
        self.closed = 0
        self.stored = asyncio.Event()
        self.stored.set()

    async def attach(self, role: str, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self.links.append(sock)
        try:
            while word := await loop.sock_recv(sock, 100):
                self.heard.append((role, word))
        finally:
            await self.stored.wait()
            self.closed += 1
            sock.close()


def program(script: str = WORKER, role: str = "trainer") -> WorkerProgram:
    return WorkerProgram(role, [sys.executable, "-u", "-c", script], {"SCRIPT": script}, forked=True)


#: Workers that do what SCRIPT in their environment says.
NURSERY = """
import os, socket, sys
from workers.nursery import Nursery
def work(role, link_fd):
    sys.argv = [role, "--link-fd", str(link_fd)]
    exec(os.environ["SCRIPT"], {"__name__": "__main__"})
    return 0
Nursery(socket.socket(fileno=int(sys.argv[-1])), work).serve()
"""


class Run:
    """A server with its supervisor, while `main` runs."""

    def __init__(self, nursery: Nursery | None) -> None:
        self.nursery = nursery

    def __call__(
        self, main: Callable[[Supervisor, Server], Coroutine[Any, Any, None]], *programs: WorkerProgram
    ) -> None:
        async def body() -> None:
            server = Server()
            supervisor = Supervisor(programs or [program()], server.attach, self.nursery)
            supervisor.start()
            try:
                await main(supervisor, server)
            finally:
                await supervisor.stop(grace_s=0)

        asyncio.run(asyncio.wait_for(body(), 60))


New = Callable[..., Nursery]


@pytest.fixture
def new_nursery() -> Iterator[New]:
    """A nursery that runs this script."""
    with ExitStack() as stack:

        def new(script: str = NURSERY) -> Nursery:
            return stack.enter_context(closing(Nursery([sys.executable, "-u", "-c", script], {})))

        yield new


@pytest.fixture(params=["executed", "forked"])
def run(request: pytest.FixtureRequest, new_nursery: New) -> Run:
    return Run(new_nursery() if request.param == "forked" else None)


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


def test_a_worker_attaches_with_its_first_word(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    async def main(supervisor: Supervisor, server: Server) -> None:
        assert [status.attached for status in supervisor.status()] == [False, False]
        await supervisor.wait_attached()
        assert supervisor.loading_s() == {}
        await until_async(lambda: len(server.heard) == 2)
        assert sorted(server.heard) == [("generator", b"hello"), ("trainer", b"hello")]
        assert all(status.attached and status.pid and not status.restarts for status in supervisor.status())

    run(main, program(), program(role="generator"))
    out, err = capfd.readouterr()
    assert out == ""
    assert "[trainer] loading the model\n" in err


def test_a_crashed_worker_is_restarted_and_the_reason_is_told(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def main(supervisor: Supervisor, server: Server) -> None:
        await supervisor.wait_attached()
        first = supervisor.status()[0].pid
        server.links[0].send(b"crash")
        await until_async(lambda: len(server.heard) == 2)
        [status] = supervisor.status()
        assert status.pid not in (None, first)
        assert (status.restarts, status.last_exit) == (1, "was killed by SIGSEGV")
        assert server.closed == 1  # the old link had ended before the new one began

    run(main)
    assert "trainer was killed by SIGSEGV; it is started again in 0.1 s" in caplog.text


def test_a_worker_of_another_version_is_told_once_and_tried_seldom(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(supervisor: Supervisor, server: Server) -> None:
        await until_async(lambda: supervisor.status()[0].restarts >= 2)

    assert Backoff.most_s < supervising.STRANGER_S
    monkeypatch.setattr(supervising, "STRANGER_S", 0.0)
    run(main, program(f"raise SystemExit({OF_ANOTHER_VERSION})"))
    assert caplog.text.count("whose files were replaced while it ran: start the server anew; it is started again") == 1


def test_kill_9_of_a_worker_restarts_it(run: Run) -> None:
    async def main(supervisor: Supervisor, server: Server) -> None:
        await supervisor.wait_attached()
        pid = supervisor.status()[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until_async(lambda: len(server.heard) == 2)

    run(main)


def test_a_worker_that_drains_is_not_restarted(run: Run) -> None:
    async def main(supervisor: Supervisor, server: Server) -> None:
        await supervisor.wait_attached()
        supervisor.retire()
        server.links[0].send(b"leave")
        await supervisor.stop(grace_s=20)
        [status] = supervisor.status()
        assert (status.pid, status.restarts, status.last_exit) == (None, 0, "exited with code 0")

    run(main)


def test_a_worker_that_takes_long_to_exit_after_its_link_has_closed_is_left_in_peace(run: Run) -> None:
    slow = WORKER.replace("sys.exit(0)", "link.close(); time.sleep(0.5); sys.exit(0)")

    async def main(supervisor: Supervisor, server: Server) -> None:
        await supervisor.wait_attached()
        supervisor.retire()
        server.links[0].send(b"leave")
        await until_async(lambda: not supervisor.status()[0].attached)
        await supervisor.stop(grace_s=20)
        assert supervisor.status()[0].last_exit == "exited with code 0"

    run(main, program(slow))


def test_a_worker_that_drains_has_all_the_time_it_was_given(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if its link is closed already: it may still be writing, on a busy machine."""
    monkeypatch.setattr("api.server.workers.supervisor.LINGER_S", 0.1)
    slow = WORKER.replace("sys.exit(0)", "link.close(); time.sleep(1.5); sys.exit(0)")

    async def main(supervisor: Supervisor, server: Server) -> None:
        await supervisor.wait_attached()
        supervisor.retire()
        server.links[0].send(b"leave")
        await supervisor.stop(grace_s=20)
        assert supervisor.status()[0].last_exit == "exited with code 0"

    run(main, program(slow))


def test_a_worker_that_hangs_is_killed(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("api.server.workers.supervisor.TERMINATE_S", 0.2)

    async def main(supervisor: Supervisor, server: Server) -> None:
        await supervisor.wait_attached()
        server.links[0].send(b"hang")
        await asyncio.sleep(0.3)
        await supervisor.stop(grace_s=0.1)
        assert supervisor.status()[0].last_exit == "was killed by SIGKILL"

    run(main)


def test_what_a_worker_has_said_and_cannot_be_stored_does_not_hold_up_the_stop(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while the database is away: SIGTERM would then end no server."""
    monkeypatch.setattr(supervising, "TERMINATE_S", 0.1)
    monkeypatch.setattr(supervising, "STORE_WITHIN_S", 0.1)

    async def main(supervisor: Supervisor, server: Server) -> None:
        await supervisor.wait_attached()
        server.stored.clear()
        server.links[0].send(b"leave")
        async with asyncio.timeout(10):
            await supervisor.stop(grace_s=0.2)
        assert supervisor.status()[0].pid is None

    run(main)


def test_a_worker_that_is_still_loading_does_not_hold_up_the_stop(run: Run) -> None:
    async def main(supervisor: Supervisor, server: Server) -> None:
        await until_async(lambda: supervisor.status()[0].pid is not None)
        await until_async(lambda: list(supervisor.loading_s()) == ["trainer"])
        started = time.monotonic()
        await supervisor.stop(grace_s=30)
        assert time.monotonic() - started < 10
        assert supervisor.loading_s() == {}
        assert server.heard == []

    run(main, program("import time; time.sleep(60)"))


def test_a_worker_that_never_comes_up_is_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(supervisor: Supervisor, server: Server) -> None:
        with pytest.raises(WorkerFailed, match=r"the trainer did not come up in 2 starts: it exited with code 3"):
            await supervisor.wait_attached()

    monkeypatch.setattr("api.server.workers.supervisor.START_ATTEMPTS", 2)
    run(main, program("raise SystemExit(3)"))


def test_a_worker_that_says_why_it_cannot_work_says_that_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Such as that a GPU is missing: one line, however it is started."""

    async def main(supervisor: Supervisor, server: Server) -> None:
        with pytest.raises(WorkerFailed, match="exited with code 1"):
            await supervisor.wait_attached()

    monkeypatch.setattr("api.server.workers.supervisor.START_ATTEMPTS", 1)
    run(main, program("raise SystemExit('there is no such device')"))
    said = capfd.readouterr()
    assert "there is no such device" in said.out + said.err + caplog.text
    assert "Traceback" not in said.out + said.err + caplog.text


def test_a_program_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(supervisor: Supervisor, server: Server) -> None:
        with pytest.raises(WorkerFailed, match=r"could not be started: .*No such file"):
            await supervisor.wait_attached()

    monkeypatch.setattr("api.server.workers.supervisor.START_ATTEMPTS", 2)
    Run(None)(main, WorkerProgram("trainer", ["/nonexistent"]))
    Run(Nursery(["/nonexistent"], {}))(main, program())


def test_a_link_that_fails_costs_the_worker_its_life_and_not_the_server(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.server.workers.supervisor.LINGER_S", 0.1)

    async def main(supervisor: Supervisor, server: Server) -> None:
        await until_async(lambda: len(server.heard) == 1)
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
from api.server.workers.nursery import Nursery
from api.server.workers.supervisor import Supervisor
from api.server.workers.worker_process import WorkerProgram
async def attach(role, sock):
    await asyncio.sleep(60)
async def main():
    script = "import sys,socket,time; s=socket.socket(fileno=int(sys.argv[2])); s.send(b'x'); time.sleep(60)"
    worker = WorkerProgram("trainer", [{sys.executable!r}, "-c", script], {{"SCRIPT": script}}, forked=True)
    nursery = Nursery([{sys.executable!r}, "-c", {NURSERY!r}], {{}}) if sys.argv[1:] else None
    supervisor = Supervisor([worker], attach, nursery)
    supervisor.start()
    await supervisor.wait_attached()
    print(supervisor.status()[0].pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a worker ends when its link closes")
@pytest.mark.parametrize("arguments", [[], ["forked"]], ids=["executed", "forked"])
def test_workers_die_with_a_server_that_is_killed(arguments: list[str]) -> None:
    command = [sys.executable, "-c", PARENT, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert not gone(worker)
        parent.kill()
    until(lambda: gone(worker), 20)


def nursery_of(worker: int) -> int:
    return psutil.Process(worker).ppid()


def test_all_are_forked_from_one_process_and_one_after_the_other_dies(new_nursery: New) -> None:
    """First each of the workers, then the nursery itself and all workers with it."""
    nursery = new_nursery()

    async def main(supervisor: Supervisor, server: Server) -> None:
        await supervisor.wait_attached()
        ours = [status.pid or 0 for status in supervisor.status()]
        mother = nursery_of(ours[0])
        assert nursery_of(ours[1]) == mother != os.getpid()
        assert os.getpgid(ours[0]) == ours[0]
        for lives, pid in enumerate(ours, 3):
            os.kill(pid, signal.SIGKILL)
            await until_async(lambda lives=lives: len(server.heard) == lives)
        later = [status.pid or 0 for status in supervisor.status()]
        assert {nursery_of(pid) for pid in later} == {mother}
        os.kill(mother, signal.SIGKILL)
        await until_async(lambda: len(server.heard) == 6)
        assert all(gone(pid) for pid in (mother, *ours, *later))
        assert [status.last_exit for status in supervisor.status()] == ["was killed by SIGKILL"] * 2
        assert len({nursery_of(status.pid or 0) for status in supervisor.status()} - {mother}) == 1

    Run(nursery)(main, program(), program(role="generator"))


def test_what_a_worker_has_is_its_own(new_nursery: New) -> None:
    """Its environment, output, signals and descriptors are not the nursery's or another worker's."""
    shown = """
import os, signal, socket, sys
link = socket.socket(fileno=int(sys.argv[-1]))
assert os.environ["OWN"] == sys.argv[0], os.environ["OWN"]
assert all(signal.getsignal(n) == signal.SIG_DFL for n in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP))
assert signal.getsignal(signal.SIGINT) == signal.default_int_handler and signal.set_wakeup_fd(-1) == -1
assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
here = [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]  # but the folder's own
assert sorted(here) == sorted(["0", "1", "2", str(link.fileno())]), here
assert os.fstat(0).st_rdev == os.stat("/dev/null").st_rdev
link.sendall(b"hello")
link.recv(10)
"""

    async def main(supervisor: Supervisor, server: Server) -> None:
        await supervisor.wait_attached()
        assert [status.restarts for status in supervisor.status()] == [0, 0]

    roles = ("trainer", "generator")
    programs = [WorkerProgram(role, ["/nonexistent"], {"SCRIPT": shown, "OWN": role}, forked=True) for role in roles]
    Run(new_nursery())(main, *programs)


def test_a_signal_to_all_processes_is_not_the_end_of_workers_that_drain(new_nursery: New) -> None:
    """A service manager sends it to the server, its workers, and the process that has forked them."""
    drains = WORKER.replace("link.sendall(b", "signal.signal(signal.SIGTERM, lambda *_: None); link.sendall(b")
    slow = drains.replace("sys.exit(0)", "time.sleep(0.5); sys.exit(0)")

    async def main(supervisor: Supervisor, server: Server) -> None:
        await supervisor.wait_attached()
        pid = supervisor.status()[0].pid or 0
        supervisor.retire()
        server.links[0].send(b"leave")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(nursery_of(pid), number)
        os.kill(pid, signal.SIGTERM)
        await supervisor.stop(grace_s=20)
        assert supervisor.status()[0].last_exit == "exited with code 0"

    Run(new_nursery())(main, program(slow))


def test_a_stop_does_not_wait_for_a_nursery_that_is_not_ready(new_nursery: New) -> None:
    nursery = new_nursery("import time; time.sleep(60)")

    async def main(supervisor: Supervisor, server: Server) -> None:
        await asyncio.sleep(0.2)
        began = time.monotonic()
        await supervisor.stop(grace_s=30)
        assert time.monotonic() - began < 10
        assert supervisor.status()[0].last_exit == "was not started"

    Run(nursery)(main)


def test_a_worker_that_nobody_wants_any_more_leaves(new_nursery: New, tmp_path: Path) -> None:
    """It is forked once the nursery is ready, and by then its link has ended."""
    told = tmp_path / "told"
    script = f"""
import socket, sys
link = socket.socket(fileno=int(sys.argv[2]))
open({str(told)!r}, "w").write(repr(link.recv(1)))
"""
    nursery = new_nursery("import time; time.sleep(0.5)\n" + NURSERY)

    async def main(supervisor: Supervisor, server: Server) -> None:
        await asyncio.sleep(0.1)
        await supervisor.stop(grace_s=30)
        await until_async(lambda: told.is_file() and told.read_text() == "b''")

    Run(nursery)(main, program(script))


def test_a_fork_that_fails_is_told_as_what_it_is(new_nursery: New, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.server.workers.supervisor.START_ATTEMPTS", 2)
    full = NURSERY.replace("import os,", "import errno, os,").replace(
        "def work", "def fork(): raise OSError(errno.EAGAIN, 'full')\nos.fork = fork\ndef work"
    )
    nursery = new_nursery(full)

    async def main(supervisor: Supervisor, server: Server) -> None:
        with pytest.raises(WorkerFailed, match=r"could not be started: .*temporarily unavailable"):
            await supervisor.wait_attached()

    Run(nursery)(main)
