"""Faults that the model has found, as the smallest programs that showed them; tests/truth/soak.py writes them."""

from __future__ import annotations

from tests.truth.programs import Bad, Batch, Create, EndSession, ForwardBackward, SaveSampler, SaveState, Step, TwoPass
from tests.truth.schedules import Mishap, Schedule
from tests.truth.search import Bench


def test_an_operation_of_two_passes_and_the_next_one_in_the_second(bench: Bench) -> None:
    """The second operation took the place of the first, whose gradient from the first pass was lost: the next step had
    a gradient of norm 259 instead of 303."""
    program = (
        Create(0, seed=24),
        ForwardBackward(0, Batch((2, 18, 6, 17, 3, 13, 20), seed=30), chunks=2),
    )
    for seed in range(8):
        bench.compare(program, Schedule(pass_tokens=40, patient=False, seed=seed))


def test_a_request_that_takes_an_hour_is_sent_again_and_nothing_behind_it_fails(bench: Bench) -> None:
    """Operations behind it would be given up after ten minutes without a second copy of the request."""
    program = (Create(0, seed=32), ForwardBackward(0, Batch((6,), 37, "custom")))
    mishap = Mishap("server", 23, "is slow", 3600)
    bench.compare(program, Schedule(patient=False, seed=488, mishaps=(mishap,)))
    assert sum(count for name, count in bench.statistics.items() if name.endswith(" is slow")) == 1


def test_what_was_pending_before_a_restart_is_done_in_its_order(bench: Bench) -> None:
    """A save was unanswered, the step after it answered: the run was rebuilt with the step, then saved."""
    program = (
        Create(run=0, session=2, seed=40),
        Create(run=1, seed=43, optimizer="dimuon"),
        Create(run=2, session=2, seed=13, mlp=False, unembed=False),
        SaveState(run=1, name=0, overwrite=True),
        Step(run=1, learning_rate=0.1, beta2=0.999, weight_decay=0.1),
        ForwardBackward(run=1, batch=Batch(lengths=(17, 1), seed=41, loss="ppo")),
        ForwardBackward(run=1, batch=Batch(lengths=(8, 11), seed=8)),
        ForwardBackward(run=2, batch=Batch(lengths=(3, 10, 2, 1, 4, 19, 4, 16), seed=27, loss="custom")),
        SaveSampler(run=0, sampler=2),
        Bad(run=2, fault="loss"),
        ForwardBackward(run=0, batch=Batch(lengths=(10, 16, 17, 8, 15, 13, 11, 16), seed=13), chunks=2),
        ForwardBackward(run=0, batch=Batch(lengths=(22, 19, 18, 22, 1), seed=11, loss="dro")),
        ForwardBackward(run=0, batch=Batch(lengths=(15, 16), seed=7, loss="ppo")),
        ForwardBackward(run=2, batch=Batch(lengths=(5,), seed=5, loss="ppo"), chunks=2),
        ForwardBackward(run=2, batch=Batch(lengths=(22, 19, 19, 8, 18), seed=21)),
        Bad(run=0, fault="loss"),
    )
    schedule = Schedule(
        pass_tokens=24,
        prefix_cache=True,
        slots=2,
        lookup=4,
        patient=False,
        seed=280,
        jitter_s=2.0,
        duplicates=0.3,
        mishaps=(
            Mishap(role="trainer", at=96),
            Mishap(role="server", at=304, kind="dies after"),
            Mishap(role="database", at=851, kind="fails after", times=2),
        ),
    )
    bench.compare(program, schedule)


def test_what_is_made_of_a_result_may_come_as_long_after_the_others_as_that_takes(bench: Bench) -> None:
    """The second pass of a loss is sent after the first's result, for which the trainer took an hour. The operations
    that had been sent behind both were given up meanwhile."""
    program = (Create(run=0, session=1), TwoPass(run=0, batch=Batch(lengths=(23,), seed=43)))
    mishap = Mishap(role="trainer", at=4, kind="is slow", times=3600)
    bench.compare(program, Schedule(pass_tokens=100, patient=False, seed=427, mishaps=(mishap,)))


def test_while_the_machine_stands_still_nothing_has_waited(bench: Bench) -> None:
    """After an hour's halt, what had arrived before an operation that it follows was given up at once."""
    program = (
        Create(run=0, session=2, seed=13),
        Create(run=1, session=2, rank=2, seed=14, attn=False),
        Create(run=2, session=2, seed=41, attn=False),
        Bad(run=0, fault="optimizer"),
    )
    mishaps = (
        Mishap(role="server", at=47, kind="dies after"),
        Mishap("server", at=92, kind="stands still", times=3600),
    )
    bench.compare(
        program,
        Schedule(pass_tokens=100, patient=False, seed=475, jitter_s=0.3, duplicates=0.3, mishaps=mishaps),
    )


def test_a_clock_that_is_set_a_day_ahead_gives_up_no_work_of_a_session_that_has_ended(bench: Bench) -> None:
    """Waiting times were read from that clock: a forward_backward was given up a moment after it was accepted."""
    program = (
        Create(run=0, session=2, seed=37),
        Create(run=1, seed=18),
        ForwardBackward(run=0, batch=Batch(lengths=(23, 1), seed=29), chunks=3),
        EndSession(session=2),
    )
    mishaps = (Mishap("database", at=179, kind="fails after"), Mishap("trainer", 11, "sets clock", times=86400))
    schedule = Schedule(
        pass_tokens=100,
        microbatch_tokens=64,
        patient=False,
        seed=678,
        pace_s=0.01,
        lost_replies=0.2,
        mishaps=mishaps,
    )
    bench.compare(program, schedule)
