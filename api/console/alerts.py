"""Alerts as people see them: an organisation sees its own; operators see all, and those that are for operators
alone."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from api.console.security import Viewer
from store.database.caller import unrestricted
from store.tables import Alert, Organisation


@dataclass(frozen=True)
class ShownAlert:
    """`whose` is shown to operators only."""

    row: Alert
    whose: str


def alerts_of(session: Session, viewer: Viewer, limit: int, *, open_only: bool = False) -> list[ShownAlert]:
    """Alerts, the latest first."""
    query = select(Alert).order_by(Alert.raised_at.desc(), Alert.id.desc()).limit(limit)
    if open_only:
        query = query.filter_by(resolved_at=None)
    if not viewer.operator:
        return [ShownAlert(row, "") for row in session.scalars(query.filter_by(org_id=viewer.org_id))]
    with unrestricted(session):
        rows = list(session.scalars(query))
        named = select(Organisation.id, Organisation.name).where(Organisation.id.in_({row.org_id for row in rows}))
        names = {org_id: name for org_id, name in session.execute(named)}
    return [ShownAlert(row, names.get(row.org_id or "", "The operator")) for row in rows]
