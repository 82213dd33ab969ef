"""One of our worker processes without a service: this is the server's end of its link."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from api.server.workers.worker_programs import memory_of_workers
from scheduler.links.configs import WorkerConfig
from scheduler.links.messages import Done, FromGenerator, FromTrainer

M = TypeVar("M", bound=msgspec.Struct)


class Worker:
    """A worker process, with one thread for each rank. It is ready when the constructor returns."""

    def __init__(self, role: str, config: WorkerConfig) -> None:
        self._link, theirs = socket.socketpair()
        self._link.settimeout(300)
        began = time.monotonic()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "workers", role, "--link-fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).parents[2],
                env={**os.environ, **memory_of_workers(), "OMP_NUM_THREADS": "1"},
                stderr=subprocess.PIPE,
                text=True,
            )
        self.pid = self._process.pid
        self.send(config)
        self.until(msgspec.Struct)
        self.ready_s = time.monotonic() - began

    def send(self, message: msgspec.Struct) -> None:
        payload = msgspec.msgpack.encode(message)
        self._link.sendall(struct.pack("<I", len(payload)) + payload)

    def until(self, kind: type[M]) -> M:
        """The next message of this kind. RuntimeError if an operation has failed."""
        while True:
            (size,) = struct.unpack("<I", self._exactly(4))
            message = msgspec.msgpack.decode(self._exactly(size), type=FromTrainer | FromGenerator)
            if isinstance(message, Done) and message.failure is not None:
                raise RuntimeError(message.failure.message)
            if isinstance(message, kind):
                return message

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            chunk = self._link.recv(size - len(data))
            if not chunk:
                raise EOFError("the worker is gone")
            data += chunk
        return data

    @property
    def pss_bytes(self) -> int:
        lines = Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))

    @property
    def read_bytes(self) -> int:
        """How many bytes the process has read from the disk."""
        lines = Path(f"/proc/{self.pid}/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))

    def end(self, number: signal.Signals = signal.SIGTERM) -> str:
        """End the process, if it is there; returns its log."""
        if self._process.returncode is None:
            self._process.send_signal(number)
            self._log = self._process.communicate()[1]
            self._link.close()
        return self._log
