"""Numbers that are known to be new without asking the database."""

from __future__ import annotations

from scheduler.journal.accepting.numbers import Highest


def test_only_what_is_above_the_highest_of_its_client_is_new() -> None:
    numbers = Highest()
    assert not numbers.is_new("sampler", 7)  # nobody has looked
    numbers.found("sampler", 7, 6)
    assert numbers.is_new("sampler", 7)
    assert not numbers.is_new("sampler", 6)
    assert not numbers.is_new("other", 7)
    assert not numbers.is_new("sampler", 10**9 + 7)  # a clone


def test_what_is_used_is_new_no_more_and_what_was_passed_over_is_asked_for() -> None:
    numbers = Highest()
    numbers.used("sampler", 3)  # of which nothing is known: higher ones may be there
    assert not numbers.is_new("sampler", 4)
    numbers.found("sampler", 4, -1)
    numbers.used("sampler", 9)
    assert [numbers.is_new("sampler", seq) for seq in (5, 9, 10)] == [False, False, True]
    numbers.found("sampler", 5, 4)  # a look that began before: nothing goes back
    assert not numbers.is_new("sampler", 9)
