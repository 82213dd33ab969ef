"""The server's side of `workers.nursery`: the process that forks workers, and what becomes of those that it forked."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from subprocess import DEVNULL, Popen

import msgspec

from workers.nursery import STATUS, Birth, die_with_parent


class Forked:
    """A forked worker. `status` tells how it ended."""

    def __init__(self, pid: int, status: socket.socket) -> None:
        self.pid, self._status = pid, status

    async def ended(self) -> int:
        """Wait for its end; returns its exit code, or minus the signal that killed it."""
        with self._status:
            # if the nursery died, the kernel has killed the worker
            return await _said(self._status, at_end=-signal.SIGKILL)


class Nursery:
    """Forks workers from a process of its own, which starts with the first worker, or earlier by `ahead`. If that
    process dies, its workers die with it, and the next fork starts it again. To be used by the main thread: the kernel
    kills the process with the thread that started it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command, self._environment = command, environment
        self._process: Popen[bytes] | None = None
        self._door: socket.socket | None = None

    def ahead(self) -> None:
        """Start the process already, because it has much to import. Raises OSError."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                self._process = Popen(
                    [*self._command, "--link-fd", str(theirs.fileno())],
                    stdin=DEVNULL,
                    env={**os.environ, **self._environment},
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
            except OSError:
                door.close()
                raise
            finally:
                theirs.close()
            self._door = door

    async def fork(self, role: str, environment: Mapping[str, str], link: int, output: int) -> Forked:
        """Fork a worker with these file descriptors. Raises OSError."""
        self.ahead()
        assert self._door is not None
        status, theirs = socket.socketpair()
        with theirs:
            word = msgspec.msgpack.encode(Birth(role, dict(environment)))
            socket.send_fds(self._door, [word], [link, output, theirs.fileno()])
        status.setblocking(False)
        try:
            pid = await _said(status, at_end=0)
            if pid <= 0:
                raise OSError(-pid, os.strerror(-pid)) if pid else OSError("its nursery has died")
        except BaseException:
            status.close()
            raise
        return Forked(pid, status)

    def close(self) -> None:
        """End the process; its workers have ended."""
        if self._process is not None and self._door is not None:
            self._door.close()
            self._process.kill()
            self._process.wait()
            self._process = None


async def _said(status: socket.socket, at_end: int) -> int:
    """The next number from the process."""
    try:
        word = await asyncio.get_running_loop().sock_recv(status, STATUS.size)
    except ConnectionResetError:
        word = b""
    return STATUS.unpack(word)[0] if word else at_end
