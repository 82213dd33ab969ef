"""A step names the gradient that it would lack, unless its client knows of the failure and has gone on."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from scheduler.order.gradients import Gradients, Lacking
from scheduler.order.plans import SENT_AGAIN


def at(second: float) -> datetime:
    return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=second)


def gradients(
    came: dict[int, float], failed: dict[int, float | None], ended: dict[int, float] | None = None
) -> Gradients:
    """forward_backwards by number: when they came; when clients were told of the failed ones, and when the others
    ended."""
    made = Gradients()
    for seq, second in came.items():
        made.came(seq, at(second))
    for seq in failed:
        made.failed(seq, f"{seq} is bad")
    for seq, told in {**failed, **(ended or {})}.items():
        if told is not None:
            made.over(seq, at(told))
    return made


BAD_1, BAD_2, BAD_3, BAD_5 = ((seq, f"{seq} is bad") for seq in (1, 2, 3, 5))


def test_a_step_sent_behind_what_fails_lacks_it() -> None:
    made = gradients({1: 0}, {1: 2})
    assert made.lacking(2, 0, None) == Lacking(BAD_1)
    assert made.lacking(1, 0, None) == Lacking()  # what comes later does not concern it


def test_the_failure_of_any_part_of_a_batch_counts() -> None:
    """Tinker's client sends the first part last, and a part may be refused before the others have come."""
    assert gradients({1: 5, 2: 0, 3: 1}, {2: 6}).lacking(4, 0, None) == Lacking(BAD_2)
    assert gradients({1: 5, 3: 1}, {2: 0}).lacking(4, 0, None) == Lacking(BAD_2)
    assert gradients({2: 0, 3: 1}, {1: 5}).lacking(4, 0, None) == Lacking(BAD_1)
    assert gradients({1: 5}, {2: 0}).lacking(3, 0, None) == Lacking(BAD_2)


def test_the_last_failure_is_told() -> None:
    made = gradients({1: 0, 2: 0}, {1: 3, 2: 2})
    assert made.lacking(3, 0, None) == Lacking(BAD_2)
    assert made.lacking(3, 0, 0) == Lacking(BAD_2, knows=0)
    assert gradients({1: 0, 2: 0, 3: 4}, {1: 3, 2: 2}).lacking(4, 0, None) == Lacking(knows=2)


def test_who_was_told_of_it_and_has_sent_another_knows() -> None:
    made = gradients({1: 0, 2: 3}, {1: 2})
    assert made.lacking(3, 0, None) == Lacking(knows=1)
    assert gradients({1: 0, 2: 3}, {1: None}).lacking(3, 0, None) == Lacking(BAD_1)


def test_who_has_sent_another_batch_in_parts_knows_whichever_part_came_first() -> None:
    assert gradients({1: 0, 2: 5, 3: 4}, {1: 2}).lacking(4, 0, None) == Lacking(knows=1)


@pytest.mark.parametrize("told", [0.5, 1.5, 2.5, 3.5])
def test_microbatches_sent_one_behind_the_other_show_nothing_although_their_client_is_told_meanwhile(
    told: float,
) -> None:
    assert gradients({2: 1, 3: 2, 4: 3}, {1: told}, {2: 5, 3: 6, 4: 7}).lacking(5, 0, None) == (
        Lacking(knows=1) if told <= 1 else Lacking(BAD_1)
    )
    assert gradients({1: 0, 3: 2, 4: 3}, {2: told}, {1: 4, 3: 6, 4: 7}).lacking(5, 0, None) == Lacking(BAD_2)


def test_a_request_that_was_sent_again_is_as_old_as_those_behind_it() -> None:
    """What comes late of a batch in parts, or is sent after one with a higher number, was called earlier."""
    assert gradients({1: 0, 2: 3, 3: 1}, {1: 2}, {3: 2.5}).lacking(4, 0, None) == Lacking(BAD_1)
    assert gradients({1: 0, 2: 3, 4: 1}, {1: 2}).lacking(3, 0, None) == Lacking(BAD_1)
    assert gradients({1: 0, 2: 3, 3: 4}, {1: 2}).lacking(4, 0, None) == Lacking(knows=1)
    again = (SENT_AGAIN - at(0)).total_seconds()
    assert gradients({1: 0, 2: again}, {1: 2}).lacking(3, 0, None) == Lacking(BAD_1)
    assert gradients({1: 0, 2: 3, 3: again}, {1: 2}).lacking(4, 0, None) == Lacking(knows=1)


def test_who_waits_for_each_microbatch_and_leaves_one_out_knows() -> None:
    assert gradients({1: 0, 3: 4, 4: 6}, {2: 3}, {1: 1, 3: 5, 4: 7}).lacking(5, 0, None) == Lacking(knows=2)
    assert gradients({1: 0, 3: 4, 4: 6}, {2: 3}, {1: 1}).lacking(5, 0, None) == Lacking(knows=2)


def test_what_is_sent_for_the_next_step_says_nothing_of_this_one() -> None:
    """Steps are sent ahead: the second's batch comes after the first's has failed, but before that is told."""
    assert gradients({1: 0, 3: 5}, {1: 2}).lacking(2, 0, None) == Lacking(BAD_1)
    assert gradients({1: 5, 3: 0}, {3: 2}).lacking(4, 2, None) == Lacking(BAD_3)


def test_what_came_before_its_client_was_told_does_not_show_that() -> None:
    made = gradients({1: 0, 2: 1}, {1: 2})
    assert made.lacking(3, 0, None) == Lacking(BAD_1)


def test_a_client_that_says_what_it_knows_is_believed_in_both_directions() -> None:
    made = gradients({1: 0, 2: 3}, {1: 2})
    assert made.lacking(3, 0, 0) == Lacking(BAD_1)
    assert made.lacking(3, 0, 1) == Lacking(knows=1)


def test_each_step_has_its_own() -> None:
    made = gradients({1: 0, 3: 0, 5: 0}, {1: 2, 5: 2})
    assert made.lacking(2, 0, None).of[1]
    assert not made.lacking(4, 2, None).of[1]  # the one at 2 has not ended, and is told of 1
    assert made.lacking(6, 4, None) == Lacking(BAD_5)
    made.used(2)
    assert not made.lacking(4, 0, None).of[1]


def test_a_step_that_was_taken_forgets_what_was_before_it_and_nothing_behind_it() -> None:
    """The first batch has not been told as ended; what its client knows of the second does not depend on that."""
    made = gradients({1: 0, 3: 2, 4: 5}, {3: 3})
    made.used(2)
    assert made.lacking(5, 0, None) == Lacking(knows=3)
