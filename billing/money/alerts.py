"""For operators: alerts, raised once for each (kind, ref) in the transaction that finds the reason; and gauges about
money for their monitoring, read from the database on each request."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from store.database.bulk import insert_into
from store.database.leaps import HEARTBEAT, settles_by
from store.tables import Alert, JobRun, Operation, StripeOutbox, Wallet

log = logging.getLogger(__name__)


def raise_alert(
    session: Session,
    *,
    kind: str,
    ref: str,
    message: str,
    now: datetime,
    org_id: str | None = None,
    detail: dict[str, Any] | None = None,
) -> bool:
    """Raise an alert; True if it is new. `org_id` None: for the operator only."""
    row = insert_into(session, Alert).values(
        kind=kind, ref=ref[:255], org_id=org_id, message=message[:1024], detail=detail or {}, raised_at=now
    )
    new = session.scalar(row.on_conflict_do_nothing().returning(Alert.id)) is not None
    if new:
        log.warning("alert %s (%s): %s", kind, ref, message)
    return new


def resolve_alert(session: Session, *, kind: str, ref: str, now: datetime) -> None:
    """Mark an alert as resolved. Its row is kept, so it is not raised again under the same (kind, ref)."""
    table = Alert
    session.execute(
        update(table).where(table.kind == kind, table.ref == ref, table.resolved_at.is_(None)).values(resolved_at=now)
    )


@dataclass(frozen=True)
class MoneyGauges:
    """`drift_nusd` is the sum found by the last reconciliation, None before the first; `succeeded`: when each job last
    succeeded; `alerts`: by kind, when the latest open alert for the operator alone was raised; `time_believed`: whether
    irreversible jobs run (`store.database.leaps`)."""

    holds_open: int
    held_nusd: int
    drift_nusd: int | None
    outbox_pending: int
    outbox_oldest_age_s: float
    succeeded: dict[str, datetime] = field(default_factory=dict)
    alerts: dict[str, datetime] = field(default_factory=dict)
    time_believed: bool = True


def read_gauges(session: Session, now: datetime) -> MoneyGauges:
    held = select(func.count()).where(Operation.state == "queued", Operation.hold_nusd > 0)
    unsent = select(func.count(), func.min(StripeOutbox.occurred_at)).where(StripeOutbox.state != "sent")
    pending, oldest = session.execute(unsent).one()
    jobs = {row.name: row for row in session.scalars(select(JobRun))}
    mine = select(Alert.kind, func.max(Alert.raised_at)).where(Alert.org_id.is_(None), Alert.resolved_at.is_(None))
    found = jobs["reconcile"].result if "reconcile" in jobs else None
    return MoneyGauges(
        holds_open=session.scalar(held) or 0,
        held_nusd=sum(session.scalars(select(Wallet.held_nusd).where(Wallet.held_nusd > 0))),
        drift_nusd=found["drift_nusd"] if found is not None else None,
        outbox_pending=pending,
        outbox_oldest_age_s=max(0.0, (now - oldest).total_seconds()) if oldest is not None else 0.0,
        succeeded={name: row.succeeded_at for name, row in sorted(jobs.items()) if row.succeeded_at is not None},
        alerts={kind: at for kind, at in session.execute(mine.group_by(Alert.kind).order_by(Alert.kind))},
        time_believed=settles_by(jobs.get(HEARTBEAT), now) is None,
    )
