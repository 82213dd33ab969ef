"""The real worker process on a socket pair: pull, work, drain, and what signals do."""

from __future__ import annotations

import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from weft.wire.checks.custom_format import encode_custom_loss

from scheduler.links.configs import Basics, TrainerBounds, TrainerConfig
from scheduler.links.messages import (
    Done,
    Drain,
    FromTrainer,
    InLoss,
    Leaving,
    Pass,
    PassOver,
    PullPass,
    Snapshot,
    loss_ref,
)
from tests.forked import Forked
from tests.workers.trainer.kit import MODEL, Bench, ce_data
from workers.model.decoder import Decoder

MEMORY = 1 << 28
PULL = PullPass([MODEL], MEMORY)


class Worker:
    """The server's end: one process and plain frames."""

    def __init__(self, data_dir: Path, models: dict[str, Path], bounds: TrainerBounds) -> None:
        self.socket, child = socket.socketpair()
        self.socket.settimeout(60)
        with child:
            self.process = Forked("-m", "workers", "trainer", "--link-fd", link=child)
        self.send(TrainerConfig(Basics(str(data_dir), {name: str(model) for name, model in models.items()}), bounds))

    @contextmanager
    def until_killed(self) -> Iterator[Worker]:
        """The process is killed at the end, if not before."""
        try:
            yield self
        finally:
            self.process.kill()
            self.process.wait()
            self.socket.close()

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
    """Only makes operations in the worker's blob store."""
    return Bench(decoder, tmp_path / "data" / "blobs")


@pytest.fixture
def bounds() -> TrainerBounds:
    """The bounds that the worker is told; a test may override them."""
    return TrainerBounds(resident_bytes=MEMORY)


@pytest.fixture
def worker(bench: Bench, model: Any, tmp_path: Path, bounds: TrainerBounds) -> Iterator[Worker]:
    model.save_pretrained(tmp_path / "model")
    with Worker(tmp_path / "data", {MODEL: tmp_path / "model"}, bounds).until_killed() as worker:
        yield worker


def test_works_then_drains(bench: Bench, worker: Worker) -> None:
    assert worker.recv() == PULL
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
    assert worker.recv() == PULL
    worker.send(Drain())
    assert worker.recv() == Leaving()
    assert worker.recv() == Snapshot("a", 2, "runs/a/state-2")
    assert worker.process.wait(timeout=30) == 0
    assert bench.blobs.path("runs/a/state-2").is_dir()


def test_sigterm_drains(worker: Worker) -> None:
    assert worker.recv() == PULL
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(timeout=30) == 0


def test_exits_when_the_server_is_gone(worker: Worker) -> None:
    assert worker.recv() == PULL
    worker.socket.close()
    assert worker.process.wait(timeout=30) == 1


def ready(bench: Bench, worker: Worker) -> None:
    """Create the run `a` in the worker, and wait until that is done."""
    assert worker.recv() == PULL
    worker.send(Pass(1, MODEL, [bench.create("a")]))
    assert isinstance(worker.recv(), Done)
    assert isinstance(worker.recv(), PassOver)
    assert worker.recv() == PULL


@pytest.mark.parametrize(
    "bounds", [TrainerBounds(loss_limit_s=1e-4, resident_bytes=MEMORY)], ids=["a tenth of a millisecond"]
)
def test_ends_itself_over_a_loss_that_takes_too_long_and_has_said_whose_it_is(bench: Bench, worker: Worker) -> None:
    """The loss has some hundred sorts: the longest that may be uploaded."""
    ready(bench, worker)
    bench.blobs.put(loss_ref("s:loss:0"), long_loss())
    operation = bench.fb("a", ce_data([40, 9], 1), "custom", loss_id="s:loss:0")
    worker.send(Pass(2, MODEL, [operation]))
    told = worker.recv()
    assert isinstance(told, InLoss)
    assert (told.op_id, told.tokens) == (operation.op_id, 49)
    with pytest.raises(EOFError):
        worker.recv()
    assert worker.process.wait(timeout=30) == -signal.SIGALRM


def long_loss() -> bytes:
    def node(op: str, name: str, target: str, *args: Any) -> dict[str, Any]:
        return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": {}}

    nodes = [node("placeholder", "logprobs", "logprobs"), node("call_method", "n0", "clone", {"ref": "logprobs"})]
    for at in range(1, 250):
        nodes.append(node("call_method", f"s{at}", "sort", {"ref": f"n{at - 1}"}))
        nodes.append(node("call_function", f"n{at}", "operator.getitem", {"ref": f"s{at}"}, 0))
    nodes.append(node("call_method", "loss", "sum", {"ref": "n249"}))
    nodes.append(node("output", "output", "output", {"tuple": [{"ref": "loss"}, {"dict": {}}]}))
    return encode_custom_loss("long", [("logprobs", 1)], {"format": 1, "nodes": nodes})


def test_ends_itself_over_a_pass_that_takes_too_long(bench: Bench, worker: Worker) -> None:
    ready(bench, worker)
    worker.send(Pass(2, MODEL, [bench.fb("a", ce_data([50] * 40, 1))], limit_s=1e-3))
    with pytest.raises(EOFError):
        worker.recv()
    assert worker.process.wait(timeout=30) == -signal.SIGALRM


def test_a_pass_within_its_time_leaves_no_timer_behind(bench: Bench, worker: Worker) -> None:
    ready(bench, worker)
    worker.send(Pass(2, MODEL, [bench.fb("a", ce_data([5], 1))], limit_s=3.0))
    assert isinstance(worker.recv(), Done)
    assert isinstance(worker.recv(), PassOver)
    assert worker.recv() == PULL
    with pytest.raises(TimeoutError):
        worker.process.wait(timeout=3.2)
