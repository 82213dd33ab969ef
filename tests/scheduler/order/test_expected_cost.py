"""What samples are charged: at most what they may use, soon about what they do use, and in the end exactly that."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from scheduler.order.expected_cost import MEMORY, WEIGHT_LASTS_S, ExpectedCosts
from scheduler.order.operations import SAMPLE, Operation
from scheduler.order.plans import Sample


def sample(session: str = "s", sequences: int = 2, prompt: int = 10, most: int = 100) -> Operation:
    plan = Sample(sequences, prompt, "interactive")
    return Operation(
        "id", "org", session, "lane", 1, SAMPLE, "m", prompt + sequences * most, "", plan, datetime.now(UTC)
    )


def charges(weight: int = 1) -> ExpectedCosts:
    return ExpectedCosts(lambda org: weight, lambda: 0.0)


def test_a_first_sample_is_charged_all_it_may_use() -> None:
    assert charges().expected(sample()) == 210


def test_later_ones_are_charged_what_their_session_used_lately() -> None:
    made = charges()
    first = sample()
    first.charged = made.expected(first)
    assert made.ended(first, {"prefill": 10, "sample": 30}) == 40 - 210
    assert made.expected(sample()) == 10 + 2 * 15
    assert made.expected(sample(sequences=4, prompt=0)) == 60
    assert made.expected(sample(session="another")) == 210


def test_never_more_than_a_sample_may_use() -> None:
    made = charges()
    made.ended(sample(sequences=1, most=1000), {"sample": 900})
    assert made.expected(sample(sequences=1, prompt=10, most=20)) == 30


def test_the_mean_follows_a_change() -> None:
    made = charges()
    for length in [100] * 64 + [10] * 400:
        made.ended(sample(sequences=1), {"sample": length})
    assert 10 <= made.expected(sample(sequences=1, prompt=0)) <= 12


def test_the_mean_is_of_sequences_not_of_samples_and_of_the_latest() -> None:
    made = charges()
    made.ended(sample(sequences=1), {"sample": 100})
    made.ended(sample(sequences=3), {"sample": 3 * 20})
    assert made.expected(sample(sequences=1, prompt=0)) == (100 + 3 * 20) / 4
    made.ended(sample(sequences=2 * MEMORY), {"sample": 2 * MEMORY * 10})
    assert made.expected(sample(sequences=1, prompt=0)) == 10


def test_what_a_cached_prompt_did_not_cost_is_given_back() -> None:
    made = charges()
    op = sample(sequences=1, prompt=1000)
    op.charged = made.expected(op)
    assert made.ended(op, {"prefill": 8, "cached_prefill": 992, "sample": 100}) == -992


def test_weights_are_read_again_after_a_while() -> None:
    now, weights = [100.0], iter([1, 5])
    made = ExpectedCosts(lambda org: next(weights), lambda: now[0])
    assert not made.weight_lasts("org")
    assert [made.known_weight("org"), made.weight("org")] == [1, 1]
    assert made.weight_lasts("org")
    now[0] += WEIGHT_LASTS_S
    assert not made.weight_lasts("org")
    assert [made.known_weight("org"), made.weight("org"), made.known_weight("org")] == [1, 5, 5]


def test_the_session_sampled_from_longest_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.order.expected_cost.REMEMBERED", 2)
    made = charges()
    for session in ("a", "b", "a", "c"):
        made.ended(sample(session, sequences=1), {"sample": 5})
    assert [made.expected(sample(session, sequences=1)) for session in "abc"] == [15, 110, 15]
