"""Small batches for the end-to-end tests, as the official SDK's types."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tinker import types


def off(on_cpu: float, on_gpu: float) -> float:
    """The tolerance for a difference, by the device that the tests run on."""
    return on_gpu if torch.cuda.is_available() else on_cpu


#: What a run computes in other company: on a CPU not at all, whatever is computed beside it. On a GPU products round by
#: the size of their batch (workers/model/isolation.py), and steps of Adam enlarge that.
OFF_IN_COMPANY = off(0.0, 1e-3)


def supervised(sequences: int = 4, length: int = 12, seed: int = 0) -> list[types.Datum]:
    """Arithmetic patterns of token ids: learnable, and different for each seed."""

    def datum(i: int) -> types.Datum:
        tokens = [(seed * 31 + 7 * i + 5 * j) % 300 + 30 for j in range(length + i + 1)]
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
        return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)

    return [datum(i) for i in range(sequences)]


def assert_as_in_other_company(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, rtol=OFF_IN_COMPANY, atol=OFF_IN_COMPANY)


def prompt(length: int = 8) -> types.ModelInput:
    return types.ModelInput.from_ints([40 + 3 * i for i in range(length)])


ADAM = types.AdamParams(learning_rate=2e-3)
