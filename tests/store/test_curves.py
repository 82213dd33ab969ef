from __future__ import annotations

import math
from datetime import UTC, datetime

import pytest
from hypothesis import given, strategies as st

from store import curves, tables
from store.curves import Point, TooManyPoints, curves_of, log_points, read_curve, thin
from store.database.db import Database
from tests.rows import run_row, session_row

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


@pytest.fixture
def stored(any_database: Database) -> Database:
    def write(session: object) -> None:
        assert hasattr(session, "add")
        session.add(tables.Organisation(id="o", name="o", created_at=NOW))
        session.add(session_row("o", NOW))
        session.flush()  # type: ignore[attr-defined]
        session.add(run_row("o", NOW, "r"))

    any_database.write_now(write)
    return any_database


def log(database: Database, *points: tuple[str, int, float]) -> int:
    return database.write_now(lambda session: log_points(session, "o", "r", [Point(*p) for p in points], NOW))


def test_points_come_back_in_order(stored: Database) -> None:
    assert log(stored, ("reward", 2, 0.5), ("reward", 0, 0.25), ("loss", 0, 3.0)) == 3
    assert log(stored, ("reward", 1, -1e-300)) == 1
    with stored.read() as session:
        curve = read_curve(session, "o", "r", "reward", 10)
        (loss, reward) = curves_of(session, "o", ["r"])["r"]
        assert curves_of(session, "someone else", ["r"]) == {}
        assert read_curve(session, "someone else", "r", "reward", 10).points == 0
    assert (curve.steps, curve.values) == ([0, 1, 2], [0.25, -1e-300, 0.5])
    assert (reward.points, reward.last_step, reward.last_value) == (3, 2, 0.5)
    assert (loss.points, loss.last_step, loss.last_value) == (1, 0, 3.0)


def test_a_step_logged_again_is_replaced(stored: Database) -> None:
    assert log(stored, ("reward", 7, 1.0), ("reward", 7, 2.0)) == 1
    assert log(stored, ("reward", 7, 3.0)) == 0
    with stored.read() as session:
        assert read_curve(session, "o", "r", "reward", 10).values == [3.0]
        assert curves_of(session, "o", ["r"])["r"][0].last_value == 3.0


def test_more_rows_than_one_statement_takes(stored: Database) -> None:
    points = [("a", step, float(step)) for step in range(1_234)]
    assert log(stored, *points) == 1_234
    assert log(stored, *points, ("a", 1_234, 0.0)) == 1


def test_bounds(stored: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "MAX_POINTS", 3)
    monkeypatch.setattr(curves, "MAX_CURVES", 2)
    log(stored, ("a", 0, 0.0), ("a", 1, 0.0), ("b", 0, 0.0))
    with pytest.raises(TooManyPoints, match="2 curves"):
        log(stored, ("c", 0, 0.0))
    with pytest.raises(TooManyPoints, match="3 points"):
        log(stored, ("a", 2, 0.0), ("a", 3, 0.0))
    assert log(stored, ("a", 2, 0.0), ("a", 1, 5.0)) == 1


def test_thinning_keeps_ends_and_spikes() -> None:
    values = [0.0] * 10_000
    values[1234], values[8765] = 99.0, -99.0
    kept = thin(values, 100)
    assert len(kept) <= 100
    assert {0, 1234, 8765, 9999} <= set(kept)


@given(st.lists(st.floats(allow_nan=False), max_size=300), st.integers(2, 50))
def test_thinning_in_general(values: list[float], limit: int) -> None:
    kept = thin(values, limit)
    assert kept == sorted(set(kept))
    assert len(kept) == len(values) if len(values) <= limit else 2 <= len(kept) <= limit
    if values and limit >= 4:
        drawn = [values[index] for index in kept]
        assert (min(drawn), max(drawn)) == (min(values), max(values))
        assert not any(math.isnan(value) for value in drawn)
