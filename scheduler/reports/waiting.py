"""How long unfinished operations have waited, for the operator's monitoring, over all organisations and replicas."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from store.tables import Operation


def oldest_s(session: Session, now: datetime) -> dict[str, float]:
    """By kind, the age in seconds of the oldest unfinished operation, waiting or being computed."""
    row = Operation
    oldest = select(row.kind, func.min(row.accepted_at)).where(row.state == "queued").group_by(row.kind)
    return {kind: max(0.0, (now - at).total_seconds()) for kind, at in session.execute(oldest)}
