"""The real worker process on a socket pair: pull, work, drain, and what signals do."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scheduler.links.configs import Basics, TrainerConfig
from scheduler.links.messages import Done, Drain, FromTrainer, Pass, PassOver, PullPass, Snapshot
from tests.workers.trainer.kit import MODEL, Bench, ce_data
from workers.model.decoder import Decoder

ROOT = Path(__file__).parents[3]


class Worker:
    """The server's end: one process and plain frames."""

    def __init__(self, data_dir: Path, model: Path) -> None:
        self.socket, child = socket.socketpair()
        self.socket.settimeout(60)
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "workers", "trainer", "--link-fd", str(child.fileno())),
            ],
            pass_fds=[child.fileno()],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        child.close()
        self.send(TrainerConfig(Basics(str(data_dir), {MODEL: str(model)})))

    def send(self, message: msgspec.Struct) -> None:
        payload = msgspec.msgpack.encode(message)
        self.socket.sendall(struct.pack("<I", len(payload)) + payload)

    def recv(self) -> Any:
        (size,) = struct.unpack("<I", self._exactly(4))
        return msgspec.msgpack.decode(self._exactly(size), type=FromTrainer)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            chunk = self.socket.recv(size - len(data))
            if not chunk:
                raise EOFError
            data += chunk
        return data


@pytest.fixture
def bench(decoder: Decoder, tmp_path: Path) -> Bench:
    """Only to make operations in the worker's blob store."""
    return Bench(decoder, tmp_path / "data" / "blobs")


@pytest.fixture
def worker(bench: Bench, model: Any, tmp_path: Path) -> Iterator[Worker]:
    model.save_pretrained(tmp_path / "model")
    worker = Worker(tmp_path / "data", tmp_path / "model")
    yield worker
    worker.process.kill()
    worker.process.wait()
    worker.socket.close()


def test_works_then_drains(bench: Bench, worker: Worker) -> None:
    assert worker.recv() == PullPass([MODEL])
    ops = [bench.create("a"), bench.fb("a", ce_data([5, 9], 1)), bench.optim("a")]
    worker.process.send_signal(signal.SIGINT)
    worker.send(Pass(7, MODEL, ops))
    for op in ops:
        done = worker.recv()
        assert isinstance(done, Done)
        assert (done.op_id, done.failure) == (op.op_id, None)
    over = worker.recv()
    assert isinstance(over, PassOver)
    assert (over.pass_id, over.tokens, over.runs) == (7, 14, 1)
    assert worker.recv() == PullPass([MODEL])
    worker.send(Drain())
    assert worker.recv() == Snapshot("a", 2, "runs/a/state-2")
    assert worker.process.wait(timeout=30) == 0
    assert bench.blobs.path("runs/a/state-2").is_dir()


def test_sigterm_drains(worker: Worker) -> None:
    assert worker.recv() == PullPass([MODEL])
    worker.process.terminate()
    assert worker.process.wait(timeout=30) == 0


def test_exits_when_the_server_is_gone(worker: Worker) -> None:
    assert worker.recv() == PullPass([MODEL])
    worker.socket.close()
    assert worker.process.wait(timeout=30) == 1
