"""The service gives the same results as a patient play of itself, to the bit: answers, weights, optimizers, step counts
and bills.

A program of several runs and organisations is played twice. First one operation at a time, undisturbed; then eagerly,
in small passes, with little memory, with requests doubled, late and out of order, while trainer, generator and server
die at any message, blob or commit. The programs are always the same; `python -m tests.truth.soak` plays others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from tests.truth.planted import PLANTED, _patched
from tests.truth.programs import Bad, Batch, Create, Forward, ForwardBackward, Sample, SaveSampler, SaveState, Step
from tests.truth.schedules import Mishap, Schedule
from tests.truth.search import Bench, Difference, search
from tests.truth.shrinking import Case
from workers.trainer.progress import Progress

#: For each fault of planted.py a short program that shows it.
FINDS: dict[str, Case] = {
    "lost gradient": (
        (Create(0), ForwardBackward(0, Batch((20, 20, 9), 1)), ForwardBackward(0, Batch((20, 20, 9), 2)), Step(0)),
        Schedule(patient=False, seed=1, pass_tokens=40),
    ),
    "snapshot too new": (
        (
            Create(0, rank=7, seed=13),
            Create(1, seed=2, mlp=False, unembed=False),
            Create(2, seed=47, attn=False),
            ForwardBackward(0, Batch((22, 18), 27, "gspo"), chunks=2),
            Forward(0, Batch((8, 2, 2), 19, "gspo")),
            ForwardBackward(2, Batch((13, 7, 12, 6, 3), 12, "custom"), chunks=2),
        ),
        Schedule(
            pass_tokens=100,
            microbatch_tokens=64,
            snapshot_every_tokens=20,
            resident_runs=1,
            most_tokens=24,
            patient=False,
            seed=820,
            pace_s=0.1,
            jitter_s=2.0,
            lost_replies=0.2,
            mishaps=(Mishap("server", 135, "dies after"),),
            steps=2,
        ),
    ),
    "short replay": (
        (
            Create(0),
            ForwardBackward(0, Batch((8,), 1)),
            Step(0),
            ForwardBackward(0, Batch((8,), 2)),
            Step(0),
        ),
        Schedule(patient=False, seed=1, mishaps=(Mishap("trainer", 12),)),
    ),
    "added twice": (
        (Create(0), ForwardBackward(0, Batch((20, 20, 9), 1))),
        Schedule(patient=False, seed=1, most_tokens=24, microbatch_tokens=32),
    ),
    "applied twice": (
        (
            Create(0),
            SaveState(0, 1),
            Step(0),
            ForwardBackward(0, Batch((3, 20, 13), 36)),
            ForwardBackward(0, Batch((3, 3, 22), 2)),
        ),
        Schedule(
            pass_tokens=17,
            microbatch_tokens=32,
            resident_runs=1,
            most_tokens=24,
            patient=False,
            seed=1,
            jitter_s=0.3,
            duplicates=1.0,
        ),
    ),
    "half a page": (
        (
            *(Create(0), Create(1)),
            *(each for turn in range(3) for run in range(2)
              for each in (ForwardBackward(run, Batch((5,), 2 * turn + run + 1)), Step(run))),
        ),
        Schedule(patient=False, seed=1, resident_runs=1, pace_s=0.1),
    ),
    "failures billed": ((Create(0), Bad(0, "token"), Step(0)), Schedule(patient=False, seed=1)),
}  # fmt: skip

#: However busy the machine is.
pytestmark = pytest.mark.timeout(1200)


def test_however_a_program_is_played_it_means_the_same(bench: Bench) -> None:
    failure = search(bench, (8, 13), faults=False)
    print(bench.report())
    assert failure is None, f"{failure.what}\n{failure.as_test()}"


def test_errors_of_disk_and_database_change_no_result(bench: Bench) -> None:
    failure = search(bench, (1000, 1005, 1009))
    print(bench.report())
    assert failure is None, f"{failure.what}\n{failure.as_test()}"


@pytest.mark.parametrize("name", PLANTED)
def test_the_model_finds_a_fault_that_is_planted(bench: Bench, name: str) -> None:
    """And no fault is found without it. `python -m tests.truth.soak --planted` finds each by random programs."""
    bench.compare(*FINDS[name])
    with pytest.raises(Difference):
        bench.compare(*FINDS[name], PLANTED[name])


def test_a_planted_fault_that_no_longer_fits_the_code_is_reported() -> None:
    def change(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self: self.renamed_since

    with (
        pytest.raises(RuntimeError, match=r"Progress\.restart is out of date: .*renamed_since"),
        _patched(Progress, "restart", change),
        suppress(AttributeError),
    ):
        Progress.restart(Progress.__new__(Progress))


def test_a_play_is_always_the_same(bench: Bench) -> None:
    """So what is found can be found again, and made smaller."""
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
