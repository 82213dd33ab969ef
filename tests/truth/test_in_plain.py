"""Random programs give the same results in the service, played patiently, and in plain torch."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from tests.truth.drawing import draw
from tests.truth.in_plain import compare_in_plain
from tests.truth.search import Bench
from tests.truth.world import Ground
from workers.trainer.losses.named import LOSS_FUNCTIONS, cross_entropy

#: Programs of a quick run, always the same ones.
NUMBERS = range(16)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_service_computes_what_plain_torch_does(bench: Bench, ground: Ground, number: int) -> None:
    program, _ = draw(number)
    done = compare_in_plain(bench, ground.reference, program)
    assert not done.differences, "\n".join(map(str, (*program, *done.differences)))


def test_a_mean_in_place_of_a_sum_is_found(bench: Bench, ground: Ground) -> None:
    def mean(lp: Any, inputs: Any, config: Any) -> Any:
        loss, metrics = cross_entropy(lp, inputs, config)
        return loss / lp.numel(), metrics

    with mock.patch.dict(LOSS_FUNCTIONS, cross_entropy=mean):
        found = [compare_in_plain(bench, ground.reference, draw(number)[0]).differences for number in NUMBERS[:4]]
    assert any("norm is off" in line for lines in found for line in lines)
