"""One worker process, from its start to its end: its link, its turn, its output.

A worker imports all that it needs, which takes most of the time of a start, and then waits with its model unread until
`begin` sends it its config. So it may be started ahead of its turn. No event loop is needed to start one.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from scheduler.links.configs import WorkerConfig
from scheduler.links.sockets import frame
from store import logs

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class WorkerProgram:
    """What to run for a role (trainer, generator, generator-2, ...), to which `--link-fd N` is added, and the config
    that it is told first (a test's may have none). With `stands_by` it may be started before its turn."""

    role: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    config: WorkerConfig | None = None
    stands_by: bool = False

    @property
    def first_word(self) -> bytes:
        """The config as it goes over the link."""
        return frame(self.config) if self.config is not None else b""


class WorkerProcess:
    """`link` is the server's end of the link; the caller closes it. Raises OSError when it cannot be started.

    Started by the main thread: where the kernel kills a worker with its parent, that is the thread which started it."""

    def __init__(self, program: WorkerProgram) -> None:
        self.link, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [*program.command, "--link-fd", str(theirs.fileno())],
                bufsize=0,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **program.environment},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C at a terminal reaches the server only, which then drains
                preexec_fn=_die_with_parent,
            )
        except OSError:
            self.link.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        self._role, self._first_word = program.role, program.first_word

    def begin(self) -> bool:
        """Its turn has come. False when it died while it waited."""
        try:
            self.link.sendall(self._first_word)
        except OSError:
            return False
        return self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """To the process and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def discard(self) -> None:
        """End one that waits for its turn: it holds nothing."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        self.link.close()
        if self._process.stdout is not None:
            self._process.stdout.close()

    async def ended(self) -> int:
        """Until the process has ended; its exit code, or minus the signal that killed it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[int] = loop.create_future()

        def tell(code: int) -> None:
            if not future.done():
                future.set_result(code)

        def wait() -> None:
            code = self._process.wait()
            with suppress(RuntimeError):  # the loop has closed meanwhile
                loop.call_soon_threadsafe(tell, code)

        threading.Thread(target=wait, name=f"waits for {self._role}", daemon=True).start()
        return await future

    async def pass_output_on(self) -> None:
        """What the worker prints goes to this process's stderr, each line with the worker's name."""
        stream, pipe = asyncio.StreamReader(), self._process.stdout
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
        rest = b""
        try:
            while chunk := await stream.read(1 << 16):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._print(line)
            if rest:
                self._print(rest)
        finally:
            transport.close()

    def _print(self, line: bytes) -> None:
        logs.pass_on(self._role, line)


def start_ahead(programs: Sequence[WorkerProgram]) -> dict[str, WorkerProcess]:
    """Those that can stand by, by role. One that cannot be started now is started when its turn comes."""
    started = {}
    for program in programs:
        if program.stands_by:
            with suppress(OSError):
                started[program.role] = WorkerProcess(program)
    return started


def _die_with_parent() -> None:
    """In the child, before it runs its program: have the kernel kill it when the server dies, even by SIGKILL."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
