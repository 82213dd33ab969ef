"""What a person should know. Raised in the transaction that finds it out, once for each (kind, ref)."""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Any

from sqlalchemy import update
from sqlalchemy.orm import Session

from store.tables import Alert
from store.upsert import insert_into

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
    """True if it is new. `org_id` None: for the operator alone."""
    row = insert_into(session, Alert).values(
        kind=kind, ref=ref[:255], org_id=org_id, message=message[:1024], detail=detail or {}, raised_at=now
    )
    new = session.scalar(row.on_conflict_do_nothing().returning(Alert.id)) is not None
    if new:
        log.warning("alert %s (%s): %s", kind, ref, message)
    return new


def resolve_alert(session: Session, *, kind: str, ref: str, now: datetime) -> None:
    """Say that it is over. It is kept, and is not raised again under the same name."""
    table = Alert
    session.execute(
        update(table).where(table.kind == kind, table.ref == ref, table.resolved_at.is_(None)).values(resolved_at=now)
    )
