"""What a month costs: so far, when it is over, and for each million tokens that came of it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy.orm import Session

from api.console import series
from billing import forecast, reports
from billing.reports import Window


@dataclass(frozen=True)
class Bill:
    """The present UTC month. `forecast_nusd` and `per_mtok_nusd` are None where there is nothing to go by."""

    month: str
    so_far_nusd: int
    forecast_nusd: int | None
    per_mtok_nusd: int | None
    method: str = forecast.METHOD


def bill(session: Session, org_id: str, now: datetime) -> Bill:
    month = reports.this_month(now)
    rows = reports.by_dimension(session, org_id, month, "kind")
    so_far = sum(row.amount_nusd for row in rows)
    yesterday = now.astimezone(UTC).date() - timedelta(days=1)
    whole = Window(yesterday - timedelta(days=forecast.MEAN_DAYS - 1), yesterday)
    days = series.daily_totals(whole, reports.by_day(session, org_id, whole))
    return Bill(f"{month.first:%B}", so_far, forecast.month_end(so_far, days, now), reports.per_mtok_got(rows))
