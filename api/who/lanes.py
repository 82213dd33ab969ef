"""A run or sampler with the facts that an operation needs of it."""

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
        """Whether `who` sees it, as `api.who.lookup.sees`, from the facts at hand."""
        return self.row.org_id == who.org_id and who.project_id in (None, self.owner.project_id)


def lane_by_id(session: Session, table: type[R], id: str) -> Lane[R] | None:
    """The run or sampler of that id, of any organisation."""
    row = session.get(table, id) if plain_id(id) else None
    if row is None:
        return None
    owner = session.get_one(tables.Session, row.session_id)
    project = session.get(tables.Project, (row.org_id, owner.project_id)) if owner.project_id is not None else None
    return Lane(row, owner, RateLimit.of(project) if project is not None else None)
