"""One worker process, from its start to its end: its link, its turn, its output.

A program may be started ahead, by another command (`workers.standby`): it imports all that it needs, which takes most
of the time of a start, and waits with its model unread until `begin`. No event loop is needed to start one.
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

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class WorkerProgram:
    """What to run for a role: trainer, generator, generator-2, ... and what instead to have it stand by until a line
    comes on stdin, if it can. `--link-fd N` is added to either."""

    role: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    standby: Sequence[str] = ()


class WorkerProcess:
    """`link` is the server's end of the link; whoever takes it closes it. Raises OSError when it cannot be started.

    Started by the main thread: where the kernel kills a worker with its parent, that is the thread which started it."""

    def __init__(self, program: WorkerProgram, *, ahead: bool = False) -> None:
        self.link, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [*(program.standby if ahead else program.command), "--link-fd", str(theirs.fileno())],
                bufsize=0,
                stdin=subprocess.PIPE if ahead else subprocess.DEVNULL,
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
        self._role = program.role

    def begin(self) -> bool:
        """Its turn has come, if it was started ahead. False when it died while it waited."""
        if self._process.stdin is None:
            return True
        try:
            self._process.stdin.write(b"\n")
            self._process.stdin.close()
        except BrokenPipeError:
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
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

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
        print(f"[{self._role}] {line.decode(errors='replace')}", file=sys.stderr, flush=True)


def start_ahead(programs: Sequence[WorkerProgram]) -> dict[str, WorkerProcess]:
    """Those that can stand by, by role. One that cannot be started is left to whoever would begin with it."""
    started = {}
    for program in programs:
        if program.standby:
            with suppress(OSError):
                started[program.role] = WorkerProcess(program, ahead=True)
    return started


def _die_with_parent() -> None:
    """In the child, before it runs its program: have the kernel kill it when the server dies, even by SIGKILL."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
