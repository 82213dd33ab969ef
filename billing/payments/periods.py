"""Billing periods: calendar months in UTC."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


def period_of(at: datetime) -> datetime:
    """The start of the month that an instant belongs to."""
    return at.astimezone(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def end_of(period_start: datetime) -> datetime:
    """The end of the month that begins at `period_start`, which is the start of the next one."""
    return period_of(period_start + timedelta(days=32))


def period_before(period_start: datetime) -> datetime:
    return period_of(period_start - timedelta(days=1))


def name_of(period_start: datetime) -> str:
    return f"{period_start:%Y-%m}"
