"""Usage by the hour: what the ledger says, grouped as a bill shows it. Read only.

An event belongs to the hour in which it was recorded; its row in `usage_hourly` is written in the same commit. Amounts
are sums of the ledger's own, so any grouping of them agrees with it to the nano-dollar; different rates within an hour
are different rows.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from store.tables import AuditEntry, UsageHour

HOUR = timedelta(hours=1)


@dataclass(frozen=True, order=True)
class UsageGroup:
    """`key_id` is the key of the request (0: none), `project_id` the session's project at that time ("": none)."""

    hour: datetime
    kind: str
    base_model: str
    session_id: str
    rate_uusd: int
    per_units: int
    project_id: str = ""
    key_id: int = 0


@dataclass(frozen=True)
class GroupRow:
    group: UsageGroup
    quantity: int
    amount_nusd: int

    @property
    def hour(self) -> datetime:
        return self.group.hour

    @property
    def session_id(self) -> str:
        return self.group.session_id


_GROUP = tuple(field.name for field in fields(UsageGroup))


@dataclass(frozen=True)
class CheckpointRow:
    """The number of checkpoints made in an hour."""

    hour: datetime
    base_model: str | None
    session_id: str | None
    count: int


def usage_rows(session: Session, org_id: str, start: datetime, end: datetime) -> list[GroupRow]:
    """Usage recorded from `start` to before `end`, by hour and then by descending quantity."""
    row = UsageHour
    query = select(row).where(row.org_id == org_id, row.hour >= start, row.hour < end)
    sums: defaultdict[UsageGroup, list[int]] = defaultdict(lambda: [0, 0])
    for found in session.scalars(query.execution_options(yield_per=10_000)):
        total = sums[UsageGroup(**{name: getattr(found, name) for name in _GROUP})]
        total[0] += found.quantity
        total[1] += found.amount_nusd
    rows = [GroupRow(group, quantity, amount) for group, (quantity, amount) in sums.items()]
    return sorted(rows, key=lambda row: (row.group.hour, -row.quantity, row.group))


def checkpoint_rows(session: Session, org_id: str, start: datetime, end: datetime) -> list[CheckpointRow]:
    """Checkpoints made from `start` to before `end`, including those deleted since."""
    entry = AuditEntry
    query = select(entry.at, entry.detail).where(entry.org_id == org_id, entry.at >= start, entry.at < end)
    counts: defaultdict[tuple[datetime, str | None, str | None], int] = defaultdict(int)
    for at, detail in session.execute(query.where(entry.event == "checkpoint_created")):
        counts[hour_of(at), detail.get("base_model"), detail.get("session_id")] += 1
    rows = [CheckpointRow(*group, count) for group, count in counts.items()]
    return sorted(rows, key=lambda row: (row.hour, -row.count, row.session_id or ""))


def hour_of(at: datetime) -> datetime:
    return at.replace(minute=0, second=0, microsecond=0)
