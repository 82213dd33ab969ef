"""Learning rates by step, by closed forms."""

from __future__ import annotations

import math

import pytest
from weft import rl
from weft.rl.loops.rate import Rate, params_of
from weft.wire.training import AdamParams


def shown(rate: Rate, steps: int) -> list[float]:
    return [rate(step) for step in range(steps)]


def test_linear_goes_up_to_its_peak_and_down_to_nothing() -> None:
    assert shown(rl.linear(1.5, 9, warmup=3), 11) == [0.5, 1.0, 1.5, 1.5, 1.25, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert shown(rl.linear(1.0, 1), 3) == [1.0, 0.0, 0.0]
    assert shown(rl.linear(1.0, 2, warmup=4), 5) == [0.25, 0.5, 0.75, 1.0, 0.0]


def test_cosine_goes_up_to_its_peak_and_down_to_its_floor() -> None:
    falls = [1.0 + (1 + math.cos(math.pi * sixth / 6)) / 4 for sixth in range(7)]
    assert shown(rl.cosine(1.5, 9, warmup=3, floor=1.0), 11) == pytest.approx([0.5, 1.0, 1.5, *falls, 1.0])
    assert shown(rl.cosine(1.0, 1), 3) == pytest.approx([1.0, 0.0, 0.0])
    assert shown(rl.cosine(1.0, 2, warmup=2), 3) == pytest.approx([0.5, 1.0, 0.0])


def test_a_rate_takes_the_place_of_the_optimizers_and_of_nothing_else() -> None:
    given = AdamParams(learning_rate=9.0, beta1=0.5, weight_decay=0.25)
    for rate, expected in ((rl.linear(1.0, 4), 0.5), (rl.constant(3), 3.0), (2, 2.0)):
        assert params_of(given, rate, 2) == AdamParams(learning_rate=expected, beta1=0.5, weight_decay=0.25)
    with pytest.raises(ValueError, match="learning_rate"):
        params_of(given, lambda _step: -1.0, 0)
