"""The cost of a month: so far, as forecast, and per million tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from api.console import series
from billing.reports import forecast, spending
from billing.reports.spending import DayRow, Window


@dataclass(frozen=True)
class Bill:
    """The present UTC month. `forecast_nusd` and `per_mtok_nusd` are None if there is nothing to go by."""

    month: str
    so_far_nusd: int
    forecast_nusd: int | None
    per_mtok_nusd: int | None
    method: str = forecast.METHOD


def billed(now: datetime, days: int = 0) -> Window:
    """The days that `bill` needs, and at least the last `days`."""
    first = min(window.first for window in (spending.this_month(now), _whole(now), spending.last_days(days or 1, now)))
    return Window(first, now.astimezone(UTC).date())


def bill(rows: Sequence[DayRow], now: datetime) -> Bill:
    """The bill of this month, from the costs of the days in `billed`, which a page reads once for everything that it
    shows."""
    month, whole = spending.this_month(now), _whole(now)
    of_month = spending.in_window(rows, month)
    so_far = sum(row.amount_nusd for row in of_month)
    days = series.daily_totals(whole, spending.in_window(rows, whole))
    return Bill(f"{month.first:%B}", so_far, forecast.month_end(so_far, days, now), spending.per_mtok_got(of_month))


def _whole(now: datetime) -> Window:
    """The days that the forecast is based on."""
    yesterday = now.astimezone(UTC).date() - timedelta(days=1)
    return Window(yesterday - timedelta(days=forecast.MEAN_DAYS - 1), yesterday)
