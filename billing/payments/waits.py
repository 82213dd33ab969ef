"""When what could not be done with Stripe is tried again."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, or_
from sqlalchemy.orm import InstrumentedAttribute

#: Nothing waits for longer.
LONGEST = timedelta(hours=1)


def is_due(at: InstrumentedAttribute[datetime], now: datetime) -> ColumnElement[bool]:
    """Whether the time of the next try has come. One further off than any wait is from a clock that was ahead."""
    return or_(at <= now, at > now + LONGEST)
