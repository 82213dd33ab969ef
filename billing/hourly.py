"""Usage by the hour: what the ledger says, grouped as a bill shows it. Read only.

An event belongs to the hour in which it was recorded. Amounts are sums of the ledger's own, so that whatever way they
are added up, they agree with it to the nano-dollar; different rates within an hour are different rows.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from store.tables import AuditEntry, UsageEvent

HOUR = timedelta(hours=1)


@dataclass(frozen=True, order=True)
class TokenGroup:
    hour: datetime
    kind: str
    base_model: str
    session_id: str
    rate_uusd_per_mtok: int


@dataclass(frozen=True)
class TokenRow:
    group: TokenGroup
    tokens: int
    amount_nusd: int


@dataclass(frozen=True)
class CheckpointRow:
    """Checkpoints that were made in an hour."""

    hour: datetime
    base_model: str | None
    session_id: str | None
    count: int


def token_rows(session: Session, org_id: str, start: datetime, end: datetime) -> list[TokenRow]:
    """Tokens recorded from `start` to before `end`, by hour and then by descending tokens."""
    event = UsageEvent
    columns = (event.recorded_at, event.kind, event.base_model, event.session_id, event.rate_uusd)
    query = select(*columns, event.quantity, event.amount_nusd)
    query = query.where(event.org_id == org_id, event.recorded_at >= start, event.recorded_at < end)
    sums: defaultdict[TokenGroup, list[int]] = defaultdict(lambda: [0, 0])
    for at, kind, base_model, session_id, rate, tokens, amount in session.execute(
        query.execution_options(yield_per=10_000)
    ):
        total = sums[TokenGroup(hour_of(at), kind, base_model, session_id, rate)]
        total[0] += tokens
        total[1] += amount
    rows = [TokenRow(group, tokens, amount) for group, (tokens, amount) in sums.items()]
    return sorted(rows, key=lambda row: (row.group.hour, -row.tokens, row.group))


def checkpoint_rows(session: Session, org_id: str, start: datetime, end: datetime) -> list[CheckpointRow]:
    """Checkpoints made from `start` to before `end`, those that are gone by now included."""
    entry = AuditEntry
    query = select(entry.at, entry.detail).where(entry.org_id == org_id, entry.at >= start, entry.at < end)
    counts: defaultdict[tuple[datetime, str | None, str | None], int] = defaultdict(int)
    for at, detail in session.execute(query.where(entry.event == "checkpoint_created")):
        counts[hour_of(at), detail.get("base_model"), detail.get("session_id")] += 1
    rows = [CheckpointRow(*group, count) for group, count in counts.items()]
    return sorted(rows, key=lambda row: (row.hour, -row.count, row.session_id or ""))


def hour_of(at: datetime) -> datetime:
    return at.replace(minute=0, second=0, microsecond=0)
