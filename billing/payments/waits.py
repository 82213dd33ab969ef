"""When an action at Stripe that failed is tried again."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, or_
from sqlalchemy.orm import InstrumentedAttribute

#: The longest wait.
LONGEST = timedelta(hours=1)


def is_due(at: InstrumentedAttribute[datetime], now: datetime) -> ColumnElement[bool]:
    """Whether the next try is due. A time further off than the longest wait was set by a fast clock."""
    return or_(at <= now, at > now + LONGEST)
