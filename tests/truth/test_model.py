"""The service against a patient play of itself, to the bit: results, weights, optimizers, step counts and bills.

A program of several runs and organisations is played twice: one operation at a time, with nothing in its way; and
eagerly, in small passes, with little memory, with requests doubled, late and out of order, while trainer, generator and
server die at any message, blob or commit. Always the same programs; `python -m tests.truth.soak` plays others.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from tests.truth.planted import PLANTED, _patched
from tests.truth.programs import Bad, Batch, Create, ForwardBackward, Sample, SaveSampler, SaveState, Step
from tests.truth.schedules import Schedule
from tests.truth.search import Bench, search
from workers.trainer.progress import Progress

#: Of each fault of planted.py, the first program that finds it (`python -m tests.truth.soak --planted` says which).
FINDS = {
    "applied twice": 0,
    "short replay": 1,
    "half a page": 5,
    "failures billed": 8,
    "snapshot too new": 10,
    "added twice": 10,
    "lost gradient": 13,
}
PROGRAMS = sorted({*FINDS.values()})

#: However busy the machine is.
pytestmark = pytest.mark.timeout(1200)


def test_however_a_program_is_played_it_means_the_same(bench: Bench) -> None:
    failure = search(bench, PROGRAMS, faults=False)
    print(bench.report())
    assert failure is None, f"{failure.what}\n{failure.as_test()}"


def test_whatever_a_disk_or_a_database_says_meanwhile(bench: Bench) -> None:
    failure = search(bench, range(1000, 1006))
    print(bench.report())
    assert failure is None, f"{failure.what}\n{failure.as_test()}"


@pytest.mark.parametrize("name", PLANTED)
def test_the_model_finds_a_fault_that_is_planted(bench: Bench, name: str) -> None:
    """When a program no longer does, another one has to."""
    failure = search(bench, [FINDS[name], *range(24)], faults=False, tries=0, plant=PLANTED[name])
    print(bench.report())
    assert failure is not None


def test_a_planted_fault_that_is_out_of_date_is_not_taken_for_found() -> None:
    def change(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self: self.renamed_since

    with (
        pytest.raises(RuntimeError, match=r"Progress\.restart is out of date: .*renamed_since"),
        _patched(Progress, "restart", change),
        suppress(AttributeError),
    ):
        Progress.restart(Progress.__new__(Progress))


def test_a_play_is_always_the_same(bench: Bench) -> None:
    """What is found can be found again, and made smaller."""
    program = (
        Create(0),
        Create(1, session=1, optimizer="dimuon"),
        ForwardBackward(0, Batch((8, 12, 20, 3), 1), chunks=2),
        ForwardBackward(1, Batch((8, 12, 20, 3), 2, "ppo")),
        Step(0),
        Bad(1, "overflow"),
        Step(1),
        SaveState(0, 1),
        SaveSampler(0, 0),
        Sample(0),
    )
    schedule = Schedule(pass_tokens=24, patient=False, seed=4, jitter_s=0.3, duplicates=0.5, lost_replies=0.3)
    one, other = bench.play(program, schedule), bench.play(program, schedule)
    assert one.statistics == other.statistics
    assert one.outcomes == other.outcomes
    failed = {place for place, (kind, *_) in one.outcomes.items() if kind != "result"}
    assert failed == {"5.0", "6.0"}  # a step behind a gradient that overflows
    assert {one.outcomes[place][:2] for place in failed} == {("error", "user")}
