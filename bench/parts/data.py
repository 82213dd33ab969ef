"""The data that benches train on with the official SDK: every token is a target, of weight 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinker import types


def datum(tokens: Sequence[int]) -> types.Datum:
    """A datum: each token but the first is predicted from those before it."""
    inputs: dict[str, Any] = {"target_tokens": list(tokens[1:]), "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=inputs)


def batch(sequences: int, length: int, seed: int = 0) -> list[types.Datum]:
    return [datum([(seed + 7 * i + 13 * j) % 500 + 20 for j in range(length + 1)]) for i in range(sequences)]
