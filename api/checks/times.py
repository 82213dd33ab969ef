"""Instants that clients name."""

from __future__ import annotations

from datetime import UTC, datetime

from api.errors import Invalid


def check_utc(at: datetime, field: str) -> datetime:
    """`at` in UTC. Refuses what is outside of the calendar there: 0001-01-01T00:00+01:00 is in no year."""
    try:
        return at.astimezone(UTC)
    except OverflowError:
        raise Invalid(f"{field}: is outside of the years 1 to 9999 in UTC, got {at.isoformat()}") from None
