"""A small bench for trainer tests: operations in, Dones out, no processes and no link."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from weft.wire import AdamParams, OptimStepRequest
from weft.wire.binary.train_codec import ArrayDatum, TrainBatch, decode_train_output, encode_train_request
from weft.wire.checks.losses import CUSTOM, LOSSES

from scheduler.links.configs import TrainerBounds
from scheduler.links.messages import Done, OpKind, Pass, PassOver, RunSpec, Snapshot, TrainOp
from store.blobs.folder import FolderBlobs
from workers.model.decoder import Decoder
from workers.trainer.runs.state import RunState
from workers.trainer.trainer import Trainer

MODEL = "tiny"


def run_spec(run_id: str, rank: int = 4, **changes: Any) -> RunSpec:
    fields: dict[str, Any] = {
        "run_id": run_id, "base_model": MODEL, "rank": rank, "alpha": 8.0, "seed": sum(map(ord, run_id)),
        "train_attn": True, "train_mlp": True, "train_unembed": True, **changes,
    }  # fmt: skip
    return RunSpec(**fields)


def ce_data(lengths: Iterable[int], seed: int, vocab_size: int = 96) -> list[ArrayDatum]:
    rng = np.random.default_rng(seed)
    return [
        ArrayDatum(
            rng.integers(0, vocab_size, n).astype(np.int32),
            {
                "target_tokens": rng.integers(0, vocab_size, n),
                "weights": rng.normal(size=n).astype(np.float32),
            },
        )
        for n in lengths
    ]


def multi_data(lengths: Iterable[int], seed: int, vocab_size: int = 96, targets: int = 3) -> list[ArrayDatum]:
    """Cross-entropy data with several weighted targets per position, repeats among them."""
    rng = np.random.default_rng(seed)
    return [
        ArrayDatum(
            rng.integers(0, vocab_size, n).astype(np.int32),
            {
                "target_tokens": rng.integers(0, 7, (n, targets)),
                "weights": rng.normal(size=(n, targets)).astype(np.float32),
            },
        )
        for n in lengths
    ]


def rl_data(lengths: Iterable[int], seed: int, vocab_size: int = 96) -> list[ArrayDatum]:
    """RL data. Only gspo takes their `sequence_ratio_mask`, over all but the first position (see `for_loss`)."""
    rng = np.random.default_rng(seed)
    return [
        ArrayDatum(
            rng.integers(0, vocab_size, n).astype(np.int32),
            {
                "target_tokens": rng.integers(0, vocab_size, n),
                "logprobs": rng.uniform(-6, -3, n).astype(np.float32),
                "advantages": rng.normal(size=n).astype(np.float32),
                "sequence_ratio_mask": (np.arange(n) > 0).astype(np.float32),
            },
        )
        for n in lengths
    ]


def for_loss(data: list[ArrayDatum], loss_fn: str) -> list[ArrayDatum]:
    """The data without the inputs that `loss_fn` does not take; a custom loss may be given any."""
    if loss_fn == CUSTOM:
        return data
    accepted = LOSSES[loss_fn].accepted
    return [ArrayDatum(d.tokens, {k: v for k, v in d.inputs.items() if k in accepted}) for d in data]


class Bench:
    """One trainer with its blobs. `ops` are made by the methods named after their kind, and executed by `go`."""

    def __init__(self, decoder: Decoder, root: Path, **bounds: int) -> None:
        self.blobs = FolderBlobs(root)
        self.decoder = decoder
        self.bounds = TrainerBounds(**bounds)
        self._pages = root.with_name(f"{root.name}-pages")
        self.restart()
        self.sent: list[Any] = []
        self.snapshots: list[Snapshot] = []
        self._seq: dict[str, int] = {}
        self._count = 0

    def restart(self) -> None:
        """The trainer is lost, and another one takes over."""
        self.trainer = Trainer({MODEL: self.decoder}, self.blobs, self.bounds, self._pages)

    def op(self, run_id: str, kind: OpKind, body: bytes = b"", **fields: Any) -> TrainOp:
        self._count += 1
        seq = self._seq[run_id] = self._seq.get(run_id, -1) + 1
        ref = f"ops/{self._count}" if body else ""
        if body:
            self.blobs.put(ref, body)
        return TrainOp(op_id=f"op{self._count}", run_id=run_id, seq=seq, kind=kind, body_ref=ref, **fields)

    def create(
        self, run_id: str, rank: int = 4, source_ref: str = "", with_optimizer: bool = False, **changes: Any
    ) -> TrainOp:
        spec = run_spec(run_id, rank, **changes)
        return self.op(run_id, OpKind.CREATE, spec=spec, source_ref=source_ref, with_optimizer=with_optimizer)

    def fb(
        self,
        run_id: str,
        data: list[ArrayDatum],
        loss_fn: str = "cross_entropy",
        kind: OpKind = OpKind.FORWARD_BACKWARD,
        **config: Any,
    ) -> TrainOp:
        batch = TrainBatch(run_id, 1, loss_fn, config, kind is OpKind.FORWARD, for_loss(data, loss_fn))
        return self.op(run_id, kind, encode_train_request(batch), stop=len(data))

    def optim(self, run_id: str, knows: int = 0, **params: float) -> TrainOp:
        request = OptimStepRequest(model_id=run_id, adam_params=AdamParams(**{"learning_rate": 1e-2, **params}))
        return self.op(run_id, OpKind.OPTIM_STEP, request.model_dump_json().encode(), knows=knows)

    def dimuon(self, run_id: str, **params: float) -> TrainOp:
        given = {"type": "dimuon", "learning_rate": 1e-2, **params}
        request = OptimStepRequest(model_id=run_id, optimizer_params=given)
        return self.op(run_id, OpKind.OPTIM_STEP, request.model_dump_json(exclude_none=True).encode())

    def go(
        self, *ops: TrainOp, release: list[str] | None = None, hand_over: list[str] | None = None
    ) -> dict[str, Done]:
        """Execute one pass and return its Dones by operation id."""
        sent: list[Any] = []
        self.trainer.execute(
            Pass(1, MODEL, list(ops), release or [], hand_over=hand_over or []), lambda *told: sent.extend(told)
        )
        assert isinstance(sent[-1], PassOver)
        self.sent = sent
        self.snapshots += [message for message in sent if isinstance(message, Snapshot)]
        dones = [message for message in sent if isinstance(message, Done)]
        assert len({done.op_id for done in dones}) == len(dones)
        return {done.op_id: done for done in dones}

    def ok(self, *ops: TrainOp) -> dict[str, Done]:
        """Like `go`, but all operations must succeed."""
        dones = self.go(*ops)
        for done in dones.values():
            assert done.failure is None, done.failure
        assert set(dones) == {op.op_id for op in ops if op.final and not op.replay}
        return dones

    def run(self, run_id: str) -> RunState:
        """The run, brought into memory."""
        run = self.trainer.held.runs[run_id]
        self.trainer.residency.need([run])
        return run


def sliced(op: TrainOp, *points: int) -> list[TrainOp]:
    """One operation in slices cut at these data indices."""
    bounds = [0, *points, op.stop]
    return [msgspec.structs.replace(op, start=a, stop=b, final=b == op.stop) for a, b in pairwise(bounds)]


def replayed(op: TrainOp) -> TrainOp:
    return msgspec.structs.replace(op, replay=True)


def output(done: Done) -> tuple[list[np.ndarray[Any, Any]], dict[str, float]]:
    """The logprobs of each datum, and the metrics."""
    outputs, metrics = decode_train_output(done.payload)
    return [fields["logprobs"] for fields in outputs], metrics


def arenas(run: RunState) -> list[Any]:
    return [run.adapter.flat, run.m, run.v]


def restore(bench: Bench, snapshot: Snapshot) -> TrainOp:
    spec = run_spec(snapshot.run_id)
    return TrainOp(
        "restore", snapshot.run_id, snapshot.seq, OpKind.CREATE,
        replay=True, source_ref=snapshot.ref, with_optimizer=True, spec=spec,
    )  # fmt: skip
