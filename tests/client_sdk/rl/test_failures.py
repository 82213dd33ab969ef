"""When a loop ends because all its groups fail, and when it says that filters take everything."""

from __future__ import annotations

from typing import Any

import pytest
from weft.errors import APIStatusError
from weft.rl.chat.chat import FATAL, StaleError
from weft.rl.loops.failures import Failures, InARow, RolloutsFailedError


def test_a_loop_ends_when_a_batch_of_groups_failed_one_after_another() -> None:
    groups, error = InARow(5), ValueError("no such column")
    assert [groups.failed(error) for _ in range(4)] == [None] * 4
    groups.rolled()
    assert [groups.failed(error) for _ in range(4)] == [None] * 4
    ended = groups.failed(error)
    assert isinstance(ended, RolloutsFailedError)
    assert str(ended) == "5 groups in a row failed; the last: ValueError: no such column"
    assert ended.__cause__ is error


def test_one_failure_of_small_batches_is_not_the_end() -> None:
    groups = InARow(1)
    assert [groups.failed(ValueError("?")) is None for _ in range(5)] == [True, True, True, False, False]


def test_the_first_of_each_kind_is_told_and_what_the_loop_ends_by_itself_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = Failures()
    for error in (ValueError("one"), StaleError("old"), KeyError("two"), ValueError("three"), StaleError("old")):
        failures.tell(error)
    assert [message.partition(" (")[0] for message in caplog.messages] == [
        "a rollout failed: ValueError: one",
        "a rollout failed: KeyError: 'two'",
    ]


def failed(kind: type[Exception], body: Any) -> Exception:
    return kind("no", 400, None, body) if issubclass(kind, APIStatusError) else kind("no")


@pytest.mark.parametrize("kind", FATAL)
def test_what_no_other_group_would_survive_ends_the_loop_as_it_is(
    kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    error = failed(kind, {"detail": "no", "code": "refused"})
    assert InARow(100).failed(error) is error
    assert not caplog.messages  # the loop tells it, once


@pytest.mark.parametrize("kind", [kind for kind in FATAL if issubclass(kind, APIStatusError)])
@pytest.mark.parametrize("body", [None, {"error": "blocked by policy"}])
def test_a_proxys_refusal_of_one_prompt_is_that_groups_own(kind: type[Exception], body: Any) -> None:
    groups = InARow(5)
    assert [groups.failed(failed(kind, body)) for _ in range(4)] == [None] * 4
    assert isinstance(groups.failed(failed(kind, body)), RolloutsFailedError)  # of all prompts it ends the loop


def test_rejections_are_told_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    groups = InARow(2)
    for _ in range(17):
        groups.rejected("not_all_equal", [0.0, 1.0])
    assert [record.getMessage().split(" were")[0] for record in caplog.records] == [
        "8 groups in a row",
        "16 groups in a row",
    ]
    groups.kept()
    for _ in range(7):
        groups.rejected("not_all_equal", [0.0, 1.0])
    assert len(caplog.records) == 2
