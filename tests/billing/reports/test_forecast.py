from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from billing.reports.forecast import MEAN_DAYS, METHOD, month_end

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)  # 7.5 days are left


@pytest.mark.parametrize(
    ("spent", "days", "forecast"),
    [
        (1000, [10] * 7, 1000 + 75),
        (0, [70, 0, 0, 0, 0, 0, 0], 75),  # a week's mean
        (1000, [0, 0, 0, 0, 0, 0, 20], 1000 + 150),  # began yesterday
        (5, [10**6, 10, 10, 10, 10, 10, 10, 10], 5 + 75),  # older days do not count
        (1000, [], None),
        (1000, [0] * 7, None),
    ],
)
def test_closed_forms(spent: int, days: list[int], forecast: int | None) -> None:
    assert month_end(spent, days, NOON) == forecast


def test_what_is_left_is_of_this_month() -> None:
    last = datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC)
    assert month_end(100, [86_400] * 7, last) == 101
    assert month_end(0, [1] * 7, last + timedelta(seconds=1)) == 31
    assert month_end(0, [1] * 7, datetime(2028, 2, 1, tzinfo=UTC)) == 29


def test_a_month_is_utc() -> None:
    tokyo = datetime(2026, 12, 1, 8, tzinfo=timezone(timedelta(hours=9)))  # still November
    assert month_end(7, [86_400] * 7, tokyo) == 7 + 3600


def test_the_sentence_names_the_days() -> None:
    assert f"last {MEAN_DAYS} whole days" in METHOD


def test_large_sums_stay_exact() -> None:
    assert month_end(10**24, [10**24 + 1] * 7, datetime(2026, 11, 30, tzinfo=UTC)) == 2 * 10**24 + 1
