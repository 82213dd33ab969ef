"""A trainer of several ranks, in a world, has the results of a patient trainer of one process, however a program is
played and whichever rank is lost or short of memory."""

from __future__ import annotations

from functools import partial
from typing import get_args

import pytest

from tests.search import TIMES, chance
from tests.truth.drawing import draw_ranks
from tests.truth.schedules import Layout
from tests.truth.search import Bench, search

#: However busy the machine is.
pytestmark = [pytest.mark.timeout(1200), pytest.mark.search]

#: The most ranks: more take a long time on few cores.
RANK_COUNTS = (2, 2, 4) if TIMES else (2,)


@pytest.mark.parametrize("layout", get_args(Layout))
def test_several_ranks_mean_what_one_means(bench: Bench, layout: Layout) -> None:
    first = chance(0).randrange(10**6) if TIMES else 0
    numbers = range(first, first + max(1, TIMES))
    failure = search(bench, numbers, tries=40, drawn=partial(draw_ranks, layout=layout, rank_counts=RANK_COUNTS))
    print(bench.report())
    assert failure is None, f"{failure.what}\n{failure.as_test()}"
