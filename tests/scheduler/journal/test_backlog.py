"""Back-pressure by organisation: operations, and bytes of bodies."""

from __future__ import annotations

import pytest

from scheduler.journal.backlog import LocalBacklog
from scheduler.order.operations import QueueFull


def test_operations_are_limited_by_organisation() -> None:
    backlog = LocalBacklog(2, 1000)
    for _ in range(2):
        backlog.take("a", 1)
    with pytest.raises(QueueFull, match="2 operations are queued; the limit is 2"):
        backlog.take("a", 1)
    backlog.take("b", 1)
    backlog.release("a", 1)
    backlog.take("a", 1)


def test_bytes_are_limited_but_one_body_is_always_let_in() -> None:
    backlog = LocalBacklog(10, 100)
    backlog.take("a", 500)
    with pytest.raises(QueueFull, match="500 bytes are queued and this operation has 1; the limit is 100"):
        backlog.take("a", 1)
    backlog.release("a", 500)
    backlog.take("a", 60)
    with pytest.raises(QueueFull):
        backlog.take("a", 41)
    backlog.take("a", 40)
    assert backlog.of("a") == (2, 100)


def test_what_an_earlier_process_accepted_counts_and_is_never_refused() -> None:
    backlog = LocalBacklog(1, 10)
    for _ in range(3):
        backlog.add("a", 9)
    assert backlog.of("a") == (3, 27)
    for _ in range(3):
        backlog.release("a", 9)
    assert backlog.of("a") == (0, 0)
