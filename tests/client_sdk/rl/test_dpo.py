"""What DPO reads of the trainer's log-probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
from weft.rl.loops.dpo import _sums
from weft.wire.inputs import Datum, ModelInput
from weft.wire.tensor import TensorData


def test_a_long_answers_sum_loses_no_digit() -> None:
    """The reference's is one of Python's floats: where both models are one, what float32 rounds would be a margin."""
    lp = -np.random.default_rng(0).exponential(2.0, 4000).astype(np.float32)
    weights = (np.arange(4000) >= 100).astype(np.float32)
    datum = Datum(ModelInput.from_ints([1] * 4000), {"weights": TensorData.from_numpy(weights)})
    (found,) = _sums([datum], [{"logprobs": TensorData.from_numpy(lp)}])
    assert found == pytest.approx(math.fsum(lp[100:].tolist()), abs=1e-9)
