"""A run or sampler, as an operation that is for it has to know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from sqlalchemy.orm import Session

from api.who.lookup import plain_id
from api.who.principal import Principal, RateLimit
from store import tables

R = TypeVar("R", bound=tables.Run | tables.Sampler)


@dataclass(frozen=True)
class Lane(Generic[R]):
    """Its row, the session that it belongs to, and the limits of that session's project, if it has one."""

    row: R
    owner: tables.Session
    project: RateLimit | None

    def seen_by(self, who: Principal) -> bool:
        """`api.who.lookup.sees`, of what is at hand."""
        return self.row.org_id == who.org_id and who.project_id in (None, self.owner.project_id)


def lane_by_id(session: Session, table: type[R], id: str) -> Lane[R] | None:
    """Whosever it is."""
    row = session.get(table, id) if plain_id(id) else None
    if row is None:
        return None
    owner = session.get_one(tables.Session, row.session_id)
    project = session.get(tables.Project, (row.org_id, owner.project_id)) if owner.project_id is not None else None
    return Lane(row, owner, RateLimit.of(project) if project is not None else None)
