"""Small batches."""

from __future__ import annotations

from typing import Any

from tinker import types

ADAM = types.AdamParams(learning_rate=2e-3)
GREEDY = types.SamplingParams(max_tokens=5, temperature=0.0, stop=[])


def tokens(index: int = 0, length: int = 12) -> list[int]:
    return [(7 * index + 5 * j) % 300 + 30 for j in range(length)]


def supervised(count: int = 3) -> list[types.Datum]:
    return [datum(tokens(i), {"weights": [1.0] * 11}) for i in range(count)]


def rewarded(logprobs: list[Any]) -> list[types.Datum]:
    """RL data; `logprobs` are those of `supervised()` under the policy that counts as their sampler."""
    return [
        datum(tokens(i), {"logprobs": [float(x) for x in lp], "advantages": [1.0 - 0.5 * i] * 11})
        for i, lp in enumerate(logprobs)
    ]


def datum(ids: list[int], inputs: dict[str, Any]) -> types.Datum:
    given = {"target_tokens": ids[1:], **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=given)


def prompt(index: int = 0, length: int = 8) -> types.ModelInput:
    return types.ModelInput.from_ints(tokens(index, length))
