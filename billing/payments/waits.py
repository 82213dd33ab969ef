"""When an action at Stripe that failed is tried again."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, or_
from sqlalchemy.orm import InstrumentedAttribute

#: The longest wait.
LONGEST = timedelta(hours=1)


def is_due(at: InstrumentedAttribute[datetime], now: datetime) -> ColumnElement[bool]:
    """The condition that the next try, set for `at`, is due. If `at` is further off than the longest wait, a fast clock
    set it: then the try is due, too."""
    return or_(at <= now, at > now + LONGEST)
