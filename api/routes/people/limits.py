"""Rate limits of the organisation, its projects and its keys. The organisation's own are the operator's to set
(`weftd org limits`); admins divide them among projects and keys."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import ColumnElement, or_, select
from sqlalchemy.orm import Session
from weft.wire.account.organisation import RateLimitsResponse, RateLimitsRow
from weft.wire.base import Positive

from api.http.access import declare
from api.http.auth import PresentPrincipalDep, PrincipalDep, while_good
from api.http.bodies import read_json
from api.state.service import Service, ServiceDep
from api.who.credentials import changed_key
from api.who.principal import RateLimit
from api.who.projects import visible_projects
from store import tables
from store.people import organisations
from store.people.keys import good_at
from store.people.organisations import LIMITS

router = APIRouter(prefix="/api/v1/weft/rate_limits")


class NewLimits(BaseModel):
    """Null means no limit of its own; the organisation's limits hold in any case."""

    model_config = ConfigDict(extra="forbid")
    requests_per_minute: Annotated[Positive, Field(le=LIMITS["requests_per_minute"])] | None = None
    tokens_per_minute: Annotated[Positive, Field(le=LIMITS["tokens_per_minute"])] | None = None
    max_in_flight: Annotated[Positive, Field(le=LIMITS["max_in_flight"])] | None = None


@router.get("", **declare(scope="any", limit="call"))
async def rate_limits(service: ServiceDep, who: PrincipalDep) -> RateLimitsResponse:
    """The limits that are set on what the key sees, and what is in flight against them now."""

    def read(session: Session) -> list[tuple[str, RateLimit]]:
        org = session.get_one(tables.Organisation, who.org_id)
        projects = select(tables.Project).where(visible_projects(who), _limited(tables.Project))
        keys = select(tables.ApiKey).where(good_at(datetime.now(UTC)), _limited(tables.ApiKey))
        keys = keys.filter_by(org_id=who.org_id)
        if who.project_id is not None:
            keys = keys.filter_by(project_id=who.project_id)
        rows: list[tables.Organisation | tables.Project | tables.ApiKey] = [org]
        rows += session.scalars(projects.order_by(tables.Project.id))
        rows += session.scalars(keys.order_by(tables.ApiKey.id))
        return [(str(row.id), RateLimit.of(row)) for row in rows]

    return RateLimitsResponse(limits=[await _row(service, id, limit) for id, limit in await service.read(read)])


@router.put("/{scope}/{id:path}", **declare(scope="admin", limit="call"))
async def set_rate_limits(
    scope: Literal["project", "key"], id: str, request: Request, service: ServiceDep, who: PresentPrincipalDep
) -> RateLimitsRow:
    """Set all limits of a project or a key; they hold within seconds."""
    body = await read_json(request, NewLimits)

    def write(session: Session) -> tuple[str, RateLimit]:
        row: tables.Project | tables.ApiKey
        if scope == "project":
            row = organisations.project_by_id(session, who.org_id, id)
        else:
            row = changed_key(session, who, id, "limit")
        organisations.set_limits(session, row, body.model_dump(), who.key_id)
        return str(row.id), RateLimit.of(row)

    return await _row(service, *await service.database.write(while_good(request, who, write), lock=who.org_id))


def _limited(table: type[tables.Project | tables.ApiKey]) -> ColumnElement[bool]:
    return or_(*(getattr(table, name).is_not(None) for name in LIMITS))


async def _row(service: Service, id: str, limit: RateLimit) -> RateLimitsRow:
    """A row of limits. `id` is the database's; what is in flight is counted under the limit's own id."""
    in_flight = service.journal.in_flight
    elsewhere = await in_flight.elsewhere(limit.scope, limit.id)
    return RateLimitsRow(
        scope=limit.scope,
        id=id,
        requests_per_minute=limit.requests_per_minute,
        tokens_per_minute=limit.tokens_per_minute,
        max_in_flight=limit.max_in_flight,
        in_flight=max(elsewhere.count, in_flight.count(limit.scope, limit.id)),
    )
