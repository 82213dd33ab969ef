"""What a month will have cost when it is over. Pure arithmetic, in integer nano-dollars."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

#: How many whole days the mean covers: a week, because weekends differ from other days.
MEAN_DAYS = 7
METHOD = "spent so far, and for the time that is left the mean of the last 7 whole days (UTC)"


def month_end(spent_nusd: int, whole_days_nusd: Sequence[int], now: datetime) -> int | None:
    """What the month of `now` will have cost: `spent_nusd` of it so far, and for the rest the mean of what the last
    whole days cost, the latest last; days before the first that cost anything do not count. None before there is a
    whole day to go by."""
    recent = list(whole_days_nusd)[-MEAN_DAYS:]
    while recent and not recent[0]:
        recent.pop(0)
    if not recent:
        return None
    now = now.astimezone(UTC)
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    first_of_next = (midnight.replace(day=1) + timedelta(days=32)).replace(day=1)
    left_s = int((first_of_next - now).total_seconds())
    return spent_nusd + sum(recent) * left_s // (len(recent) * 86_400)
