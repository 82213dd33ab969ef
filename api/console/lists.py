"""What list pages share: paging, and names for ids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Query
from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from api.console.titles import run_titles
from billing.reports.spending import Dimension
from store.tables import ApiKey, Membership, Project, User

T = TypeVar("T")

PageNumber = Annotated[int, Query(ge=1, le=1_000_000)]
PAGE_SIZE = 25
#: A search text. Not every database takes NUL.
Text = Annotated[str, Query(max_length=256, pattern=r"^[^\x00]*$")]


@dataclass(frozen=True)
class Pages:
    """Which page of a list is shown: `number` counts from 1."""

    number: int
    total: int
    size: int = PAGE_SIZE

    @property
    def offset(self) -> int:
        return (self.number - 1) * self.size

    @property
    def first(self) -> int:
        return min(self.offset + 1, self.total)

    @property
    def last(self) -> int:
        return min(self.offset + self.size, self.total)


def paged(session: Session, query: Select[T], number: int) -> tuple[list[T], Pages]:
    """One page of what `query` finds, in its order."""
    total = session.scalar(select(func.count()).select_from(query.order_by(None).subquery())) or 0
    pages = Pages(number, total)
    return list(session.scalars(query.limit(pages.size).offset(pages.offset))), pages


def names(session: Session, org_id: str, dimension: Dimension, values: Iterable[str | None]) -> dict[str | None, str]:
    """The names of projects, keys, users and runs with these ids; one without a name is called by its id."""
    wanted = [value for value in values if value is not None]
    found: dict[str | None, str] = {None: "none", **{value: value for value in wanted}}
    for start in range(0, len(wanted), 500):
        part = wanted[start : start + 500]
        found.update(_names(session, org_id, dimension, part))
    return found


def _names(session: Session, org_id: str, dimension: Dimension, values: list[str]) -> dict[str | None, str]:
    if dimension == "run":
        return {run_id: title for run_id, title in run_titles(session, org_id, values).items()}
    if dimension == "project":
        projects = session.execute(
            select(Project.id, Project.name).filter_by(org_id=org_id).where(Project.id.in_(values))
        )
        return {project_id: name for project_id, name in projects}
    if dimension == "user":
        query = select(User.id, User.email).join(Membership, Membership.user_id == User.id)
        users = session.execute(query.where(Membership.org_id == org_id, User.id.in_(values)))
        return {user_id: email for user_id, email in users}
    if dimension == "key":
        ids = [int(value) for value in values if value.isdecimal() and len(value) < 19]
        keys: Any = session.execute(
            select(ApiKey.id, ApiKey.name, ApiKey.prefix).filter_by(org_id=org_id).where(ApiKey.id.in_(ids))
        )
        return {str(key_id): f"{name} ({prefix}…)" if name else f"{prefix}…" for key_id, name, prefix in keys}
    return {}
