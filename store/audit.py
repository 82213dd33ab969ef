"""The audit log: one row for each thing that was done to keys, sessions, projects and checkpoints.

`record` runs inside the transaction that does the thing, so there is no deed without its row and no row without its
deed. The database refuses to change rows.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy.orm import Session

from store.tables import AuditEntry

#: What can be asked for, and the beginnings of the events that belong to it.
GROUPS: dict[str, tuple[str, ...]] = {
    "all": ("",),
    "checkpoints": ("checkpoint_",),
    "projects": ("project_",),
    "teams": ("team_",),
    "organizations": ("key_", "organization_"),
}


def record(
    session: Session,
    *,
    org_id: str,
    key_id: int | None,
    event: str,
    target: str,
    detail: dict[str, Any] | None = None,
    at: datetime | None = None,
) -> None:
    """Note that `key_id` (None: the server itself, or its operator) did `event`, `<resource>_<action>`, to `target`:
    an id, or the tinker:// path of a checkpoint."""
    session.add(
        AuditEntry(
            org_id=org_id, at=at or datetime.now(UTC), key_id=key_id, event=event, target=target, detail=detail or {}
        )
    )
