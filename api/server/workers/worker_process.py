"""One worker process, from its start to its end: its link, its config, its output."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from api.server.workers.nursery import Nursery
from scheduler.links.configs import WorkerConfig
from scheduler.links.sockets import frame
from store import logs
from workers.nursery import die_with_parent


@dataclass(frozen=True)
class WorkerProgram:
    """What to run for a role (trainer, generator, generator-2, ...), to which `--link-fd N` is added, and the config
    that it is told first (a test's may have none). `forked`: a nursery may fork it instead."""

    role: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    config: WorkerConfig | None = None
    forked: bool = False

    @property
    def first_word(self) -> bytes:
        """The config as bytes for the link."""
        return frame(self.config) if self.config is not None else b""


class Process(Protocol):
    pid: int

    async def ended(self) -> int:
        """Wait for its end; returns its exit code, or minus the signal that killed it."""


class Executed:
    """A worker started as a program."""

    def __init__(self, program: WorkerProgram, link: socket.socket, output: int) -> None:
        self._process = subprocess.Popen(
            [*program.command, "--link-fd", str(link.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **program.environment},
            pass_fds=(link.fileno(),),
            start_new_session=True,  # Ctrl-C at a terminal then reaches only the server, which drains
            preexec_fn=die_with_parent,
        )
        self.pid = self._process.pid

    async def ended(self) -> int:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[int] = loop.create_future()

        def tell(code: int) -> None:
            if not future.done():
                future.set_result(code)

        def wait() -> None:
            code = self._process.wait()
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(tell, code)

        threading.Thread(target=wait, name=f"waits for process {self.pid}", daemon=True).start()
        return await future


async def start(program: WorkerProgram, nursery: Nursery | None = None) -> WorkerProcess:
    """One that has been told its config. Raises OSError if it cannot be started.

    By the main thread: where the kernel kills a worker with its parent, that is the thread which started it."""
    link, theirs = socket.socketpair()
    output, written = os.pipe()
    try:
        process: Process
        if nursery is not None and program.forked:
            role = program.role.partition("-")[0]
            process = await nursery.fork(role, program.environment, theirs.fileno(), written)
        else:
            process = Executed(program, theirs, written)
        with suppress(OSError):  # it has died already, which is reported later
            link.sendall(program.first_word)
    except BaseException:
        link.close()
        os.close(output)
        raise
    finally:
        theirs.close()
        os.close(written)
    return WorkerProcess(program.role, process, link, output)


class WorkerProcess:
    """`link` is the server's end of the link; the caller closes it."""

    def __init__(self, role: str, process: Process, link: socket.socket, output: int) -> None:
        self.link, self.pid, self.ended = link, process.pid, process.ended
        self._role, self._output = role, output

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and all its descendants."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    async def pass_output_on(self) -> None:
        """Copy what the worker prints to this process's stderr, each line with the worker's name."""
        stream, pipe = asyncio.StreamReader(), os.fdopen(self._output, "rb", buffering=0)
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
