"""What sessions have left open when they ended: housekeeping of each server and the replica that leads end it."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from scheduler.order.operations import SAMPLE
from store import tables

#: Samples of a base model that are found in one look.
SAMPLES = 500


def open_runs(session: Session) -> list[str]:
    """The runs that are still open though their session has ended, also those that were being made just then."""
    run, owner = tables.Run, tables.Session
    query = select(run.id).join(owner, owner.id == run.session_id).where(run.state == "live", owner.state != "active")
    return list(session.scalars(query))


def waiting_samples(session: Session, before: datetime) -> list[tuple[str, str]]:
    """Organisations and request ids of samples that have waited since `before` though their session has ended: the
    oldest of each base model, for those of one that is served and busy are left to wait, and must not hide others."""
    op, owner = tables.Operation, tables.Session
    place = func.row_number().over(partition_by=op.base_model, order_by=(op.accepted_at, op.id)).label("place")
    query = select(op.org_id, op.id, place).join(owner, owner.id == op.session_id).where(op.state == "queued")
    left = query.where(op.kind == SAMPLE, op.accepted_at < before, owner.state != "active").subquery()
    found = select(left.c.org_id, left.c.id).where(left.c.place <= SAMPLES).order_by(left.c.place, left.c.id)
    return [(org_id, op_id) for org_id, op_id in session.execute(found)]
