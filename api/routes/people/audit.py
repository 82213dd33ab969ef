"""The audit log, a day at a time."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from sqlalchemy import or_, select
from sqlalchemy.orm import Session
from weft.wire.account.billing import AuditLogEntry, AuditLogResponse

from api.http.access import declare
from api.http.auth import PrincipalDep
from api.state.service import ServiceDep
from api.who.tokens import owner_urn
from store import tables
from store.database.audit import GROUPS

router = APIRouter(prefix="/api/v1")

#: How many entries one answer may have; `truncated` says that there are more.
MAX_ENTRIES = 20_000
EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]


@router.get("/audit", **declare(scope="admin", limit="call"))
async def audit_log(
    service: ServiceDep,
    who: PrincipalDep,
    event_type: EventType = "all",
    day: date | None = None,
    offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
) -> AuditLogResponse:
    """What was done in the organisation on one day (UTC, today if not said), in order, from the entry at `offset`."""
    start = datetime.combine(day or datetime.now(UTC).date(), time(), UTC)
    row = tables.AuditEntry

    def read(session: Session) -> AuditLogResponse:
        query = select(row).where(row.org_id == who.org_id, row.at >= start)
        if start.date() < date.max:
            query = query.where(row.at < start + timedelta(days=1))
        query = query.where(or_(*(row.event.startswith(prefix, autoescape=True) for prefix in GROUPS[event_type])))
        found = list(session.scalars(query.order_by(row.at, row.id).offset(offset).limit(MAX_ENTRIES + 1)))
        entries = [_entry(entry) for entry in found[:MAX_ENTRIES]]
        return AuditLogResponse(entries=entries, truncated=len(found) > MAX_ENTRIES)

    return await service.read(read)


def _entry(row: tables.AuditEntry) -> AuditLogEntry:
    """`model_id`, `tinker_path` and `purpose` repeat parts of `event_details`, for older clients. `by` is the key that
    was used, if any; else the person."""
    by = owner_urn(row.key_id) if row.key_id is not None else f"weft:{row.actor}"
    checkpoint = row.event.startswith("checkpoint_")
    return AuditLogEntry(
        timestamp=row.at,
        event=row.event,
        event_details={**row.detail, "by": by, "actor": row.actor, "target": row.target},
        model_id=row.detail.get("model_id") if checkpoint else None,
        tinker_path=row.target if checkpoint else None,
        purpose=row.detail.get("purpose") if checkpoint else None,
    )
