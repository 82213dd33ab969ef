"""A run or sampler with the facts that an operation needs of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from sqlalchemy.orm import Session

from api.who.lookup import row_of_anyone
from api.who.principal import Principal, RateLimit
from store import tables

R = TypeVar("R", bound=tables.Run | tables.Sampler)


@dataclass(frozen=True)
class Lane(Generic[R]):
    """A lane's row, its session, and the limits of the session's project, if the session has one."""

    row: R
    owner: tables.Session
    project: RateLimit | None

    def seen_by(self, who: Principal) -> bool:
        """True if `who` sees the lane: `api.who.lookup.sees` without asking the database."""
        return self.row.org_id == who.org_id and who.project_id in (None, self.owner.project_id)


def lane_by_id(session: Session, table: type[R], id: str) -> Lane[R] | None:
    """The run or sampler of that id, of any organisation."""
    row = row_of_anyone(session, table, id)
    if row is None:
        return None
    owner = session.get_one(tables.Session, row.session_id)
    project = session.get(tables.Project, (row.org_id, owner.project_id)) if owner.project_id is not None else None
    return Lane(row, owner, RateLimit.of(project) if project is not None else None)
