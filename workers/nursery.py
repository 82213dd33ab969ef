"""Workers that are forked: to import torch takes longer than all the rest of a worker's start, and it is done once.

One process per server has imported what workers need, and forks one for each request on its door (a socket of packets):
a Birth, with the descriptors of the worker's link, of its output and of its status. On its status each says its process
id, or minus the errno of why there is none, and when it has ended its exit code, or minus the signal that killed it; a
status that ends without that has ended with the nursery, since no worker outlives it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn

import msgspec

from workers.leave import leave

#: The argument that names its role.
NURSERY = "nursery"
#: The largest Birth, in bytes.
BIRTH_BYTES = 1 << 16
#: The form of a number on a status.
STATUS = struct.Struct("<i")

_FOR_OTHERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class Birth(msgspec.Struct):
    role: str
    environment: dict[str, str]


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that has started it ends, however it ends. Linux only."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Nursery:
    """`work` is what a worker does, given its role and the descriptor of its link; it returns its exit code."""

    def __init__(self, door: socket.socket, work: Callable[[str, int], int]) -> None:
        self._door, self._work = door, work
        self._statuses: dict[int, int] = {}  # the descriptor of each worker's, by its process
        self._woken, self._wakes = os.pipe()
        for end in (self._woken, self._wakes):
            os.set_blocking(end, False)

    def serve(self) -> None:
        """Fork workers until the door closes. Signals sent to all processes of a service (systemd does that) are
        ignored: workers finish what they have begun, and the server closes the door."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_OTHERS)
        signal.signal(signal.SIGCHLD, _nothing)
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        door = self._door.fileno()
        while True:
            ready, _, _ = select.select([door, self._woken], [], [])
            if self._woken in ready:
                os.read(self._woken, 1 << 10)
                self._tell_ends()
            if door in ready:
                word, fds, _, _ = socket.recv_fds(self._door, BIRTH_BYTES, 3)
                if not word:
                    return
                self._give_birth(msgspec.msgpack.decode(word, type=Birth), *fds)

    def _give_birth(self, birth: Birth, link: int, output: int, status: int) -> None:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            pid = -(error.errno or 1)
        if pid == 0:
            os.close(status)
            self._live(birth, link, output, parent)
        os.close(link)
        os.close(output)
        if pid > 0:
            self._statuses[pid] = status
            with suppress(OSError):  # the process has ended already
                # before anybody knows of it: a signal to its group then reaches all that it starts
                os.setpgid(pid, pid)
        _say(status, pid)
        if pid < 0:
            os.close(status)

    def _live(self, birth: Birth, link: int, output: int, parent: int) -> NoReturn:
        """The life of a worker, in the forked process."""
        code = 1
        try:
            die_with_parent()
            if os.getppid() != parent:  # the parent died before that call
                leave(code)
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_OTHERS)  # a signal that came meanwhile is handled now
            for other in (self._woken, self._wakes, self._door.fileno(), *self._statuses.values()):
                os.close(other)
            for standard in (1, 2):
                os.dup2(output, standard)
            os.close(output)
            os.environ.update(birth.environment)
            code = self._work(birth.role, link)
        except SystemExit as said:  # as Python would: a line for people, and no traceback
            if said.code is None or isinstance(said.code, int):
                code = said.code or 0
            else:
                print(said.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            leave(code)

    def _tell_ends(self) -> None:
        for pid in list(self._statuses):
            ended, how = os.waitpid(pid, os.WNOHANG)
            if ended:
                status = self._statuses.pop(pid)
                _say(status, os.waitstatus_to_exitcode(how))
                os.close(status)


def _say(status: int, number: int) -> None:
    with suppress(OSError):  # nobody reads the status any more
        os.write(status, STATUS.pack(number))


def _nothing(signum: int, frame: FrameType | None) -> None:
    """A signal handler that does nothing: the signal's number is written to the wakeup descriptor, which is all that is
    needed."""
