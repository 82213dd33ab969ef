"""A trainer of two ranks in a world: however a program is played, and whichever rank is lost or short of memory, all is
as a patient trainer of one process has it."""

from __future__ import annotations

from functools import partial
from typing import Literal

import pytest

from tests.search import TIMES, chance
from tests.truth.drawing import draw_ranks
from tests.truth.search import Bench, search

#: However busy the machine is.
pytestmark = [pytest.mark.timeout(1200), pytest.mark.search]
#: Programs of an ordinary run.
PROGRAMS = 2


@pytest.mark.parametrize("layout", ["mapped", "parts"])
def test_two_ranks_mean_what_one_means(bench: Bench, layout: Literal["mapped", "parts"]) -> None:
    first = chance(0).randrange(10**6) if TIMES else 0
    numbers = range(first, first + PROGRAMS * max(1, TIMES))
    failure = search(bench, numbers, tries=40, drawn=partial(draw_ranks, layout=layout))
    print(bench.report())
    assert failure is None, f"{failure.what}\n{failure.as_test()}"
