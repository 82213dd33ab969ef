"""What the model has found, as the smallest programs that showed it; `python -m tests.truth.soak` writes them."""

from __future__ import annotations

from tests.truth.programs import Batch, Create, ForwardBackward
from tests.truth.schedules import Mishap, Schedule
from tests.truth.search import Bench


def test_an_operation_of_two_passes_and_the_next_one_in_the_second(bench: Bench) -> None:
    """The second operation took the place of the first, whose gradient of the first pass was lost: the next step had
    a gradient of norm 259 instead of 303."""
    program = (
        Create(0, seed=24),
        ForwardBackward(0, Batch((2, 18, 6, 17, 3, 13, 20), seed=30), chunks=2),
    )
    for seed in range(8):
        bench.compare(program, Schedule(pass_tokens=40, patient=False, seed=seed))


def test_a_request_that_takes_an_hour_is_sent_again_and_nothing_behind_it_fails(bench: Bench) -> None:
    """What follows it is given up after ten minutes, if the server has had no other copy of it by then."""
    program = (Create(0, seed=32), ForwardBackward(0, Batch((6,), 37, "custom")))
    mishap = Mishap("server", 23, "is slow", 3600)
    bench.compare(program, Schedule(patient=False, seed=488, mishaps=(mishap,)))
    assert sum(count for name, count in bench.statistics.items() if name.endswith(" is slow")) == 1
