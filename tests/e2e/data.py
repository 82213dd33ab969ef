"""Small batches for the end-to-end tests, as the official SDK's types."""

from __future__ import annotations

from tinker import types


def supervised(sequences: int = 4, length: int = 12, seed: int = 0) -> list[types.Datum]:
    """Arithmetic patterns of token ids: learnable, and different for each seed."""

    def datum(i: int) -> types.Datum:
        tokens = [(seed * 31 + 7 * i + 5 * j) % 300 + 30 for j in range(length + i + 1)]
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
        return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)

    return [datum(i) for i in range(sequences)]


def prompt(length: int = 8) -> types.ModelInput:
    return types.ModelInput.from_ints([40 + 3 * i for i in range(length)])


ADAM = types.AdamParams(learning_rate=2e-3)
