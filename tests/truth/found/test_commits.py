"""Faults that the model has found where a commit fails after its statements have run."""

from __future__ import annotations

from tests.truth.programs import Batch, Create, ForwardBackward, Sample
from tests.truth.schedules import Mishap, Schedule
from tests.truth.search import Bench


def test_a_run_that_came_with_an_operation_is_inserted_again(bench: Bench) -> None:
    """The second attempt inserted the operation but took the run for stored: its client was told that it exists, and
    then found nothing (number 770157)."""
    program = (
        Create(0, seed=33, attn=False),
        Create(1, seed=10, attn=False, unembed=False, optimizer="dimuon"),
        Sample(None, session=1, seed=16, temperature=0.0, prompt=5, num_samples=2),
        ForwardBackward(0, Batch((20,), 38, "custom"), chunks=3),
    )
    schedule = Schedule(
        pass_tokens=100, microbatch_tokens=64, patient=False, seed=393, pace_s=0.1, jitter_s=0.3, duplicates=0.3,
        mishaps=(Mishap("server", 37), Mishap("database", 294, "fails", times=2)),
    )  # fmt: skip
    bench.compare(program, schedule)
