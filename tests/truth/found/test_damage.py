"""Faults that the model has found where files are cut."""

from __future__ import annotations

from tests.truth.programs import Batch, Create, ForwardBackward
from tests.truth.schedules import Mishap, Schedule
from tests.truth.search import Bench


def test_an_uploaded_loss_that_was_cut_is_an_answer_and_no_error_of_the_server(bench: Bench) -> None:
    """The client was told 500, and so asked again for ever."""
    program = (Create(run=0, seed=1), ForwardBackward(run=0, batch=Batch(lengths=(13,), seed=5, loss="custom")))
    mishap = Mishap(role="server", at=1, kind="cuts")
    schedule = Schedule(pass_tokens=100, microbatch_tokens=64, patient=False, seed=971, mishaps=(mishap,))
    bench.compare(program, schedule)
