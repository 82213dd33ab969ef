"""What the model has found, as the smallest programs that showed it; `python -m tests.truth.soak` writes them."""

from __future__ import annotations

from tests.truth.programs import Batch, Create, ForwardBackward
from tests.truth.schedules import Schedule
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
