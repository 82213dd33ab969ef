"""What ended sessions have left open. Housekeeping of each server, and the leading replica, ends it."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from scheduler.order.operations import SAMPLE
from store import tables

#: How many waiting samples of one base model are looked for at a time.
SAMPLES = 500


def open_runs(session: Session) -> list[str]:
    """Runs that are still open though their session has ended, also if they were just being made."""
    run, owner = tables.Run, tables.Session
    query = select(run.id).join(owner, owner.id == run.session_id).where(run.state == "live", owner.state != "active")
    return list(session.scalars(query))


def waiting_samples(session: Session, before: datetime) -> list[tuple[str, str]]:
    """(organisation, request id) of samples that have waited since `before` though their session has ended: the oldest
    of each base model. Samples of a busy model are left to wait, and must not hide those of other models."""
    op, owner = tables.Operation, tables.Session
    place = func.row_number().over(partition_by=op.base_model, order_by=(op.accepted_at, op.id)).label("place")
    query = select(op.org_id, op.id, place).join(owner, owner.id == op.session_id).where(op.state == "queued")
    left = query.where(op.kind == SAMPLE, op.accepted_at < before, owner.state != "active").subquery()
    found = select(left.c.org_id, left.c.id).where(left.c.place <= SAMPLES).order_by(left.c.place, left.c.id)
    return [(org_id, op_id) for org_id, op_id in session.execute(found)]
