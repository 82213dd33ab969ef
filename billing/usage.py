"""What was used: one row for each kind of token of each operation, written once and never changed.

`record` is called inside the transaction that makes an operation's result lasting, and nowhere else, so there is no
result without its metering and no metering without a result. The database refuses a second row for one
(operation, kind), which is what makes a replay free.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from billing.prices import PriceList, amount_nusd
from store.tables import UsageEvent


@dataclass(frozen=True)
class UsageRow:
    """A sum of events. `run_id` is None for samples from a base model."""

    run_id: str | None
    kind: str
    base_model: str
    tokens: int
    amount_nusd: int


def record(
    session: Session,
    *,
    org_id: str,
    session_id: str,
    run_id: str | None,
    operation_id: str,
    base_model: str,
    tokens_by_kind: dict[str, int],
    prices: PriceList,
    at: datetime,
) -> list[UsageEvent]:
    """Meter an operation that was accepted at `at`, which decides its prices. Kinds without tokens make no row.

    Returns the rows that this call has written: none for an operation that was recorded before."""
    insert = sqlite.insert if session.get_bind().dialect.name == "sqlite" else postgresql.insert
    written: list[UsageEvent] = []
    for kind, tokens in tokens_by_kind.items():
        if tokens < 0:
            raise ValueError(f"operation {operation_id} reports {tokens} tokens of {kind}: usage cannot be negative")
        if tokens == 0:
            continue
        rate = prices.rate(base_model, kind, at)
        row = insert(UsageEvent).values(
            org_id=org_id,
            session_id=session_id,
            run_id=run_id,
            operation_id=operation_id,
            kind=kind,
            base_model=base_model,
            quantity=tokens,
            price_version=rate.version,
            rate_uusd=rate.uusd_per_mtok,
            amount_nusd=amount_nusd(tokens, rate.uusd_per_mtok),
            recorded_at=datetime.now(UTC),
        )
        # Not rowcount: psycopg answers -1 whether or not there was a conflict.
        event = session.scalars(row.on_conflict_do_nothing().returning(UsageEvent)).one_or_none()
        if event is not None:
            written.append(event)
    return written


def summary(session: Session, org_id: str, run_id: str | None = None, since: datetime | None = None) -> list[UsageRow]:
    """Usage of an organisation by run, kind and base model, of one run only or since an instant if asked.

    Added up in Python: SQLite's SUM fails beyond 64 bits and PostgreSQL's changes its type."""
    query = select(
        UsageEvent.run_id, UsageEvent.kind, UsageEvent.base_model, UsageEvent.quantity, UsageEvent.amount_nusd
    ).where(UsageEvent.org_id == org_id)
    if run_id is not None:
        query = query.where(UsageEvent.run_id == run_id)
    if since is not None:
        query = query.where(UsageEvent.recorded_at >= since)
    sums: defaultdict[tuple[str | None, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for run, kind, base_model, tokens, amount in session.execute(query.execution_options(yield_per=10_000)):
        total = sums[run, kind, base_model]
        total[0] += tokens
        total[1] += amount
    return [
        UsageRow(*key, tokens, amount)
        for key, (tokens, amount) in sorted(sums.items(), key=lambda item: (item[0][0] or "", *item[0][1:]))
    ]
