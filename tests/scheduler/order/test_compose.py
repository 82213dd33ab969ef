"""What a trainer is told of the passes to come."""

from __future__ import annotations

from typing import Any

from scheduler.order.compose import MAX_UPCOMING, upcoming
from scheduler.order.fair import FairTree


def test_upcoming_takes_turns_among_organisations() -> None:
    queue: FairTree[Any] = FairTree()
    for path in (("m", "x", "x1"), ("m", "x", "x2"), ("m", "x", "x1"), ("m", "y", "y1"), ("other", "z", "z1")):
        queue.push((*path[:2], "batch", path[2]), object(), 10)
    assert upcoming(queue, "m") == ["x1", "y1", "x2"]
    assert upcoming(queue, "other") == ["z1"]
    assert upcoming(queue, "none") == []
    assert sum(1 for _ in queue) == 5


def test_upcoming_is_bounded() -> None:
    queue: FairTree[Any] = FairTree()
    for i in range(3 * MAX_UPCOMING):
        queue.push(("m", "x", "interactive", f"run{i}"), object(), 10)
    assert upcoming(queue, "m") == [f"run{i}" for i in range(MAX_UPCOMING)]
