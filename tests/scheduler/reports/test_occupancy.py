"""Which tenants had the machines when, from the times that operations have recorded."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from scheduler.reports.occupancy import Stretch, timeline

SINCE = datetime(2026, 11, 21, 12, tzinfo=UTC)
START = SINCE.timestamp()


def line(*found: Stretch, buckets: int = 4, seen: set[str] | None = None) -> dict[str, list[float]]:
    until = SINCE + timedelta(seconds=10 * buckets)
    return timeline(found, SINCE, until, buckets, {"me"} if seen is None else seen).shares


def stretch(owner: str, start: float, end: float, weight: float = 1.0) -> Stretch:
    return Stretch(owner, START + start, START + end, weight)


def test_alone() -> None:
    assert line(stretch("me", 0, 10), stretch("me", 15, 20)) == {"me": pytest.approx([1.0, 0.5, 0.0, 0.0])}


def test_a_pass_is_divided_by_tokens() -> None:
    shares = line(stretch("me", 0, 10, 0.25), stretch("you", 0, 10, 0.75))
    assert shares == {"me": pytest.approx([0.25, 0, 0, 0]), "others": pytest.approx([0.75, 0, 0, 0])}


def test_others_are_one_unless_seen() -> None:
    found = [stretch("me", 0, 10), stretch("you", 10, 20), stretch("them", 20, 30)]
    assert set(line(*found)) == {"me", "others"}
    assert set(line(*found, seen={"me", "you", "them"})) == {"me", "you", "them"}
    assert line(*found)["others"] == pytest.approx([0, 1, 1, 0])


def test_what_overlaps_never_exceeds_the_machine() -> None:
    """The samples of many are computed at the same time; together they have no more than the whole machine."""
    shares = line(*(stretch("me" if n % 2 else "you", 0, 20, 0.5) for n in range(16)))
    assert [a + b for a, b in zip(shares["me"], shares["others"], strict=True)] == pytest.approx([1, 1, 0, 0])


def test_the_edges() -> None:
    assert line(stretch("me", -50, 5), stretch("me", 35, 90))["me"] == pytest.approx([0.5, 0, 0, 0.5])
    assert line() == {}
    assert line(stretch("me", -20, -10), stretch("me", 50, 60)) == {}
