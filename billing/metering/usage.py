"""Usage summed by run, from the hourly sums, which agree with the events to the nano-dollar."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from store.tables import UsageHour


@dataclass(frozen=True)
class UsageRow:
    """A sum of events. `run_id` is None for samples of a base model; `quantity` is tokens, or byte-hours of storage."""

    run_id: str | None
    kind: str
    base_model: str
    quantity: int
    amount_nusd: int


def summary(session: Session, org_id: str, run_id: str | None = None, since: datetime | None = None) -> list[UsageRow]:
    """Usage of an organisation by run, kind and base model, of one run only or since an hour if asked.

    Added up in Python: SQLite's SUM fails beyond 64 bits and PostgreSQL's changes its type."""
    hour = UsageHour
    query = select(hour.run_id, hour.kind, hour.base_model, hour.quantity, hour.amount_nusd)
    query = query.where(hour.org_id == org_id)
    if run_id is not None:
        query = query.where(hour.run_id == run_id)
    if since is not None:
        query = query.where(hour.hour >= since)
    sums: defaultdict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for run, kind, base_model, quantity, amount in session.execute(query.execution_options(yield_per=10_000)):
        total = sums[run, kind, base_model]
        total[0] += quantity
        total[1] += amount
    return [
        UsageRow(run or None, kind, base_model, quantity, amount)
        for (run, kind, base_model), (quantity, amount) in sorted(sums.items())
    ]
