"""Small batches for the tests of the API."""

from __future__ import annotations

from typing import Any

import numpy as np
from weft.wire.binary.train_codec import ArrayDatum, TrainBatch


def datum(tokens: list[int], **inputs: Any) -> ArrayDatum:
    """A cross-entropy datum; `inputs` replace its own or (None) remove them."""
    n = len(tokens)
    named: dict[str, Any] = {"target_tokens": np.array(tokens, dtype=np.int64), "weights": np.ones(n, dtype=np.float32)}
    named |= {name: np.array(value) for name, value in inputs.items() if value is not None}
    for name, value in inputs.items():
        if value is None:
            named.pop(name, None)
    return ArrayDatum(np.array(tokens, dtype=np.int32), named)


def batch(run: str, seq: int, data: list[ArrayDatum] | None = None, **changes: Any) -> TrainBatch:
    fields = {"loss_fn": "cross_entropy", "data": [datum([1, 2, 3])] if data is None else data}
    return TrainBatch(run, seq, **(fields | changes))
