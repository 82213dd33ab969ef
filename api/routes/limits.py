"""Rate limits of the organisation, its projects and its keys. The organisation's own are the operator's to set
(`weftd org limits`); admins divide them among projects and keys."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from api.http.access import declare
from api.http.auth import PrincipalDep
from api.http.bodies import read_json
from api.routes.keys import managed_key
from api.state.service import ServiceDep
from api.who.principal import RateLimit
from api.who.projects import visible_projects
from store import people, tables

router = APIRouter(prefix="/api/v1/weft/rate_limits")

PerMinute = Annotated[int, Field(ge=1, le=2**31 - 1)]


class NewLimits(BaseModel):
    """Null is no limit of its own; those of the organisation hold in any case."""

    model_config = ConfigDict(extra="forbid")
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: Annotated[int, Field(ge=1, le=2**53)] | None = None
    max_in_flight: PerMinute | None = None


@router.get("", **declare(scope="any", limit="call"))
async def rate_limits(service: ServiceDep, who: PrincipalDep) -> dict[str, Any]:
    """The limits that are set on what the key sees, and what is in flight against them now."""
    in_flight = service.journal.in_flight

    def read(session: Session) -> list[dict[str, Any]]:
        org = session.get_one(tables.Organisation, who.org_id)
        projects = session.scalars(select(tables.Project).where(visible_projects(who)).order_by(tables.Project.id))
        of_org = select(tables.ApiKey).filter_by(org_id=who.org_id).order_by(tables.ApiKey.id)
        keys = session.scalars(of_org if who.project_id is None else of_org.filter_by(project_id=who.project_id))
        rows: list[tables.Organisation | tables.Project | tables.ApiKey] = [org, *projects, *keys]
        return [_describe(row) for row in rows if row is org or _limited(row)]

    found = await service.read(read)
    return {"limits": [entry | {"in_flight": in_flight.count(*entry.pop("counted"))} for entry in found]}


@router.put("/{scope}/{id}", **declare(scope="admin", limit="call"))
async def set_rate_limits(
    scope: Literal["project", "key"], id: str, request: Request, service: ServiceDep, who: PrincipalDep
) -> dict[str, Any]:
    """Set all limits of a project or a key; they hold within seconds."""
    body = await read_json(request, NewLimits)

    def write(session: Session) -> dict[str, Any]:
        row: tables.Project | tables.ApiKey
        row = people.project_by_id(session, who.org_id, id) if scope == "project" else managed_key(session, who, id)
        people.set_limits(session, row, body.model_dump(), who.key_id)
        return _describe(row)

    entry = await service.database.write(write)
    return entry | {"in_flight": service.journal.in_flight.count(*entry.pop("counted"))}


def _limited(row: tables.Organisation | tables.Project | tables.ApiKey) -> bool:
    return any(getattr(row, name) is not None for name in people.LIMITS)


def _describe(row: tables.Organisation | tables.Project | tables.ApiKey) -> dict[str, Any]:
    limit = RateLimit.of(row)
    return {"scope": limit.scope, "id": str(row.id), "counted": (limit.scope, limit.id)} | {
        name: getattr(row, name) for name in people.LIMITS
    }
