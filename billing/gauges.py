"""What an operator's monitoring asks of the money, read from the database when it asks; of nobody in particular."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from store.tables import JobRun, Operation, StripeOutbox, Wallet


@dataclass(frozen=True)
class MoneyGauges:
    """`drift_nusd` is what the last reconciliation found, None before the first; `succeeded` says when jobs last did
    what they are for."""

    holds_open: int
    held_nusd: int
    drift_nusd: int | None
    outbox_pending: int
    outbox_oldest_age_s: float
    succeeded: dict[str, datetime] = field(default_factory=dict)


def read_gauges(session: Session, now: datetime) -> MoneyGauges:
    held = select(func.count()).where(Operation.state == "queued", Operation.hold_nusd > 0)
    unsent = select(func.count(), func.min(StripeOutbox.occurred_at)).where(StripeOutbox.state != "sent")
    pending, oldest = session.execute(unsent).one()
    jobs = {row.name: row for row in session.scalars(select(JobRun))}
    found = jobs["reconcile"].result if "reconcile" in jobs else None
    return MoneyGauges(
        holds_open=session.scalar(held) or 0,
        held_nusd=sum(session.scalars(select(Wallet.held_nusd).where(Wallet.held_nusd > 0))),
        drift_nusd=found["drift_nusd"] if found is not None else None,
        outbox_pending=pending,
        outbox_oldest_age_s=max(0.0, (now - oldest).total_seconds()) if oldest is not None else 0.0,
        succeeded={name: row.succeeded_at for name, row in sorted(jobs.items()) if row.succeeded_at is not None},
    )
