"""The worker processes of an embedded service: started, watched, restarted, and stopped.

Each worker is a child process with a socket pair to this one. A worker counts as attached once it has said its first
word on the link: then its model is loaded. Nothing here knows what the words mean; `attach` does.

No worker outlives the server. On Linux the kernel kills it with its parent, and everywhere it ends when its link
closes. A worker that dies is started again, soon at first and then with growing pauses.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from api.server.workers.nursery import Nursery
from api.server.workers.worker_process import WorkerProcess, WorkerProgram, start
from scheduler.links.configs import OF_ANOTHER_VERSION

log = logging.getLogger(__name__)

#: Takes over, and closes, the server's end of a link; returns when the link has closed.
Attach = Callable[[str, socket.socket], Awaitable[None]]

#: After this many starts in a row without success, the cause is taken to be permanent.
START_ATTEMPTS = 5
#: A worker whose link has closed should be about to exit; after this long it is killed.
LINGER_S = 5.0
#: The pause before a worker of another version is started again: the right files may be put back.
STRANGER = "is of another version than the server, whose files were replaced while it ran: start the server anew"
STRANGER_S = 60.0
#: Between SIGTERM and SIGKILL.
TERMINATE_S = 3.0
#: How long the storing of what workers have said may take when the server stops: while the database is away it would
#: take for ever. What is not stored then is computed again after the start.
STORE_WITHIN_S = 10.0


class WorkerFailed(RuntimeError):
    """A worker did not come up, however often it was started."""


@dataclass
class Backoff:
    """The pause before a restart: it doubles with every short life and begins anew after a healthy one. A life begins
    when the worker has attached: a long start does not count."""

    first_s: float = 0.1
    most_s: float = 5.0
    healthy_s: float = 5.0
    _next_s: float = field(default=0.0, init=False)

    def pause_s(self, lived_s: float) -> float:
        pause = self.first_s if lived_s >= self.healthy_s or not self._next_s else self._next_s
        self._next_s = min(2 * pause, self.most_s)
        return pause


@dataclass(frozen=True)
class WorkerStatus:
    """A worker as an operator sees it. `last_exit` says how the process before this one ended."""

    role: str
    pid: int | None
    attached: bool
    restarts: int
    last_exit: str | None


class Supervisor:
    """Keeps one process alive for each program, from `start` to `stop`, within one event loop. The `nursery` forks
    those that may be forked; its owner closes it."""

    def __init__(self, programs: Sequence[WorkerProgram], attach: Attach, nursery: Nursery | None = None) -> None:
        self._keepers = [_Keeper(program, attach, nursery) for program in programs]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the workers; they attach when they are ready, which `wait_attached` awaits."""
        self._tasks = [asyncio.create_task(keeper.keep()) for keeper in self._keepers]

    async def wait_attached(self) -> None:
        """Wait until every worker has attached once. Raises WorkerFailed when a worker does not come up."""
        await asyncio.gather(*(keeper.came_up() for keeper in self._keepers))

    def retire(self) -> None:
        """Do not restart workers from now on; call it before they are told to drain."""
        for keeper in self._keepers:
            keeper.retire()

    async def stop(self, grace_s: float) -> None:
        """Give workers that were told to drain `grace_s` to exit, then terminate, then kill. None is left after. What
        their links have not stored by then is given up."""
        self.retire()
        for keeper in self._keepers:
            if keeper.loading_since is not None:  # it holds no work, and cannot be told to drain
                keeper.signal(signal.SIGTERM)
        if not await self._all_ended(grace_s):
            for number, wait_s in ((signal.SIGTERM, TERMINATE_S), (signal.SIGKILL, STORE_WITHIN_S)):
                for keeper in self._keepers:
                    keeper.signal(number)
                if await self._all_ended(wait_s):
                    break
        for task in self._tasks:
            if not task.cancel() and not task.cancelled():
                task.result()

    def status(self) -> list[WorkerStatus]:
        return [keeper.status() for keeper in self._keepers]

    def loading_s(self) -> dict[str, float]:
        """Since when each worker that has not attached yet has been loading, by role."""
        found = {keeper.program.role: keeper.loading_since for keeper in self._keepers}
        return {role: time.monotonic() - since for role, since in found.items() if since is not None}

    async def _all_ended(self, timeout_s: float) -> bool:
        if not self._tasks:
            return True
        _, pending = await asyncio.wait(self._tasks, timeout=timeout_s)
        return not pending


class _Keeper:
    """Keeps one worker running: starts it, and each time that it ends, a successor."""

    def __init__(self, program: WorkerProgram, attach: Attach, nursery: Nursery | None) -> None:
        self.program = program
        self.retired = asyncio.Event()
        self.attached = False
        self.loading_since: float | None = None
        self._attach = attach
        self._nursery = nursery
        self._starting: asyncio.Task[WorkerProcess] | None = None
        self._ever_attached = asyncio.Event()
        self._failed = asyncio.Event()
        self._process: WorkerProcess | None = None
        self._attached_at: float | None = None
        self._starts = 0
        self._last_exit: str | None = None

    async def keep(self) -> None:
        backoff = Backoff()
        while not self.retired.is_set():
            self._starts += 1
            self._attached_at, before = None, self._last_exit
            self._last_exit = await self._live()
            if self.retired.is_set():
                log.info("%s %s", self.program.role, self._last_exit)
                return
            if self._starts == START_ATTEMPTS and not self._ever_attached.is_set():
                self._failed.set()
            lived_s = 0.0 if self._attached_at is None else time.monotonic() - self._attached_at
            pause_s, told = backoff.pause_s(lived_s), False
            if self._last_exit == STRANGER:
                pause_s, told = STRANGER_S, before == STRANGER
            if not told:
                log.warning("%s %s; it is started again in %.1f s", self.program.role, self._last_exit, pause_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.retired.wait(), pause_s)

    async def came_up(self) -> None:
        waits = {asyncio.create_task(event.wait()) for event in (self._ever_attached, self._failed)}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not self._ever_attached.is_set():
            raise WorkerFailed(
                f"the {self.program.role} did not come up in {self._starts} starts: it {self._last_exit}"
            )

    def retire(self) -> None:
        """Start no successor from now on."""
        self.retired.set()
        if self._starting is not None:
            self._starting.cancel()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker and all its descendants."""
        if self._process is not None:
            self._process.signal(number)

    def status(self) -> WorkerStatus:
        pid = self._process.pid if self._process is not None else None
        return WorkerStatus(self.program.role, pid, self.attached, max(0, self._starts - 1), self._last_exit)

    async def _live(self) -> str:
        """One life of the worker, until process and link have both ended. Returns how it ended."""
        self._starting = asyncio.create_task(start(self.program, self._nursery))
        try:
            self._process = process = await self._starting
        except OSError as error:
            return f"could not be started: {error}"
        except asyncio.CancelledError:
            if not self.retired.is_set():
                raise
            return "was not started"
        finally:
            self._starting = None
        self.loading_since = time.monotonic()
        output = asyncio.create_task(process.pass_output_on())
        link = asyncio.create_task(self._talk(process))
        exited = asyncio.create_task(process.ended())
        try:
            await asyncio.wait({link, exited}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({exited}, timeout=LINGER_S)
            if self.retired.is_set():  # it may still have much to write: `stop` sets the time for that
                await asyncio.wait({exited})
            process.signal(signal.SIGKILL)  # also descendants that it may have left behind
            code = await exited
            self._process = None
            await asyncio.gather(link, output)
        finally:
            process.signal(signal.SIGKILL)
            self._process = self.loading_since = None
        return _how_it_ended(code)

    async def _talk(self, process: WorkerProcess) -> None:
        """Wait for the worker's first word, then hand the link over until it closes."""
        sock = process.link
        sock.setblocking(False)
        if not await _has_spoken(sock):
            sock.close()
            return
        self.attached, self.loading_since = True, None
        self._attached_at = time.monotonic()
        self._ever_attached.set()
        log.info("%s attached (pid %s)", self.program.role, process.pid)
        try:
            await self._attach(self.program.role, sock)
        except Exception:
            log.exception("the link to the %s failed", self.program.role)
        finally:
            self.attached = False


async def _has_spoken(sock: socket.socket) -> bool:
    """Wait for a first byte, without reading it. False if the link closed without one."""
    loop = asyncio.get_running_loop()
    said = asyncio.Event()
    loop.add_reader(sock, said.set)
    try:
        await said.wait()
    finally:
        loop.remove_reader(sock)
    with suppress(ConnectionResetError):
        return bool(sock.recv(1, socket.MSG_PEEK))
    return False


def _how_it_ended(code: int) -> str:
    if code == OF_ANOTHER_VERSION:
        return STRANGER
    if code >= 0:
        return f"exited with code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
