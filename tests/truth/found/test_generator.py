"""Faults that the model has found in samples."""

from __future__ import annotations

from tests.truth.programs import Sample
from tests.truth.schedules import Mishap, Schedule
from tests.truth.search import Bench


def test_a_sample_whose_body_cannot_be_read_for_a_moment(bench: Bench) -> None:
    mishap = Mishap(role="generator", at=2, kind="fails")
    schedule = Schedule(pass_tokens=100, microbatch_tokens=64, patient=False, seed=965, mishaps=(mishap,))
    bench.compare((Sample(sampler=None, session=1, seed=46),), schedule)
