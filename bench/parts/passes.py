"""Passes of a trainer in this process, without a service: their bodies, and their messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from weft.wire import AdamParams, OptimStepRequest
from weft.wire.binary.train_codec import ArrayDatum, TrainBatch, encode_train_request

from scheduler.links.messages import Done, Pass
from workers.trainer.trainer import Trainer

#: The body of an AdamW step.
STEP = (
    OptimStepRequest(model_id="any", adam_params=AdamParams(learning_rate=1e-4))
    .model_dump_json(exclude_none=True)
    .encode()
)


def cut(tokens: int, sequence: int) -> list[int]:
    """Cut this many tokens into sequences of at most `sequence`."""
    return [sequence] * (tokens // sequence) + [tokens % sequence] * (tokens % sequence > 0)


def random_batch(vocab: int, lengths: Sequence[int], seed: int) -> bytes:
    """The body of a forward_backward of random tokens, in sequences of these lengths."""
    rows = [np.random.default_rng((seed, place)).integers(0, vocab, length) for place, length in enumerate(lengths)]
    data = [
        ArrayDatum(row.astype(np.int32), {"target_tokens": row, "weights": np.ones(len(row), np.float32)})
        for row in rows
    ]
    return encode_train_request(TrainBatch("any", 1, "cross_entropy", {}, False, data))


def execute(trainer: Trainer, pass_: Pass) -> None:
    """Execute a pass. RuntimeError if one of its operations fails."""
    told: list[Any] = []
    trainer.execute(pass_, lambda *messages: told.extend(messages))
    failed = [message.failure.message for message in told if isinstance(message, Done) and message.failure is not None]
    if failed:
        raise RuntimeError(f"an operation has failed: {failed[0]}")
