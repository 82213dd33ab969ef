"""Sessions: made, kept alive, ended, listed, found, and moved between projects."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from sqlalchemy import Select, select
from sqlalchemy.orm import Session
from weft.wire.rest import Cursor, GetSessionResponse, ListSessionsResponse
from weft.wire.service import (
    CreateSessionRequest,
    CreateSessionResponse,
    FinishSessionRequest,
    SessionHeartbeatRequest,
    SessionHeartbeatResponse,
    StatusResponse,
)
from weft.wire.sessions import (
    AssignProjectRequest,
    AssignProjectResponse,
    SessionSearchRequest,
    SessionSearchResponse,
)

from api.checks.runs import check_metadata, check_text
from api.errors import Invalid, NotFound, quote
from api.http.access import LOOKING, WORKING, declare
from api.http.auth import PrincipalDep
from api.http.bodies import read_json
from api.operations.paying import need_room
from api.routes.runs.listing import Scope
from api.routes.stored.checkpoints import Limit, Offset, count
from api.state.liveness import end, runs_of
from api.state.service import ServiceDep
from api.who.lookup import session_by_id, visible
from api.who.may_change import own_session
from api.who.principal import Principal
from api.who.projects import check_project, project_for
from api.who.session_search import DEFAULT_PROJECT, search, text_values
from store import tables
from store.database import audit
from store.database.clock import clock

router = APIRouter(prefix="/api/v1")

MAX_TAGS = 64
MAX_DETAIL = 4096


@router.post("/create_session", response_model_exclude_none=True, **declare(scope=WORKING, limit="call"))
async def create_session(request: Request, service: ServiceDep, who: PrincipalDep) -> CreateSessionResponse:
    """A new session. A retry is known by its idempotency key, from which the id then follows."""
    body = await read_json(request, CreateSessionRequest)
    if len(body.tags) > MAX_TAGS:
        raise Invalid(f"tags: {len(body.tags)} tags, the limit is {MAX_TAGS}")
    check_project(body.project_id)
    now = datetime.now(UTC)
    key = request.headers.get("x-idempotency-key")
    new = tables.Session(
        id=str(uuid.uuid5(uuid.NAMESPACE_OID, f"{who.domain} {key}") if key else uuid.uuid4()),
        org_id=who.org_id,
        key_id=who.key_id,
        user_id=who.user_id,
        state="active",
        sdk_version=check_text(body.sdk_version, "sdk_version", 64),
        display_name=check_text(body.display_name, "display_name", 256),
        tags=[check_text(tag, f"tags.{index}", 256) for index, tag in enumerate(body.tags)],
        user_metadata=check_metadata(body.user_metadata),
        created_at=now,
        last_seen_at=now,
    )

    def write(session: Session) -> None:
        if session.get(tables.Session, new.id) is None:
            need_room(session, who.org_id, service.settings.limits, "sessions")
            new.project_id, new.last_seen_at = project_for(session, who, body.project_id), clock(session)
            session.add(new)
            _note(session, who, "session_created", new.id, new.project_id)

    await service.database.write(write, lock=who.org_id)
    return CreateSessionResponse(session_id=new.id)


@router.post("/session_heartbeat", **declare(scope=WORKING, limit="poll"))
async def session_heartbeat(request: Request, service: ServiceDep, who: PrincipalDep) -> SessionHeartbeatResponse:
    """Keeps a session alive. 410 once it has ended is how its clients learn of it."""
    body = await read_json(request, SessionHeartbeatRequest)
    await service.liveness.beat(who, body.session_id)
    return SessionHeartbeatResponse()


@router.post("/sessions/search", **declare(scope=LOOKING, limit="call"))
async def search_sessions(request: Request, service: ServiceDep, who: PrincipalDep) -> SessionSearchResponse:
    """The organisation's sessions that match, newest first, in pages."""
    body = await read_json(request, SessionSearchRequest)
    return await service.read(lambda session: search(session, who, body))


@router.post("/sessions/{session_id}/finish", **declare(scope=WORKING, limit="call"))
async def finish_session(session_id: str, request: Request, service: ServiceDep, who: PrincipalDep) -> StatusResponse:
    """The client is done: what is queued still runs, then its runs are forgotten. The first reason stands."""
    body = await read_json(request, FinishSessionRequest)
    detail = check_text(body.detail, "detail", MAX_DETAIL)

    def write(session: Session) -> list[str]:
        row = own_session(session, who, session_id)
        end(session, row, "finished", reason=body.reason.type, detail=detail, key_id=who.key_id)
        return runs_of(session, row.id)

    runs = await service.database.write(write)
    service.liveness.ended([session_id])
    for run_id in runs:
        service.journal.close_run(run_id)
    return StatusResponse(status="finished")


@router.put("/sessions/{session_id}/project", **declare(scope=WORKING, limit="call"))
async def assign_project(
    session_id: str, request: Request, service: ServiceDep, who: PrincipalDep
) -> AssignProjectResponse:
    """Move a session, with its runs, checkpoints and usage, into a project."""
    body = await read_json(request, AssignProjectRequest)
    check_project(body.project_id)

    def write(session: Session) -> str | None:
        row = own_session(session, who, session_id)
        project = project_for(session, who, body.project_id)
        if row.project_id != project:
            row.project_id = project
            _note(session, who, "project_session_assigned", row.id, project)
        return project

    project = await service.database.write(write, lock=who.org_id)
    service.runs.clear()
    service.samplers.clear()
    return AssignProjectResponse(project_id=project or DEFAULT_PROJECT)


@router.get("/sessions", **declare(scope=LOOKING, limit="call"))
async def sessions(
    service: ServiceDep, who: PrincipalDep, limit: Limit = 20, offset: Offset = 0, access_scope: Scope = "owned"
) -> ListSessionsResponse:
    """Ids of sessions, newest first."""

    def read(session: Session) -> ListSessionsResponse:
        query = _in_scope(select(tables.Session.id), who, access_scope)
        total = count(session, query)
        newest = (tables.Session.created_at.desc(), tables.Session.id.desc())
        page = session.scalars(query.order_by(*newest).limit(limit).offset(offset))
        return ListSessionsResponse(sessions=list(page), cursor=Cursor(offset=offset, limit=limit, total_count=total))

    return await service.read(read)


@router.get("/sessions/{session_id}", **declare(scope=LOOKING, limit="call"))
async def session_details(
    session_id: str, service: ServiceDep, who: PrincipalDep, access_scope: Scope = "owned"
) -> GetSessionResponse:
    def read(session: Session) -> GetSessionResponse:
        row = session_by_id(session, who, session_id)
        if access_scope == "owned" and not who.owns(row):
            raise NotFound(f"no session {quote(session_id)} of this key: ask with access_scope=accessible")
        runs = select(tables.Run.id).filter_by(session_id=row.id).order_by(tables.Run.model_seq_id)
        samplers = select(tables.Sampler.id).filter_by(session_id=row.id)
        return GetSessionResponse(
            training_run_ids=list(session.scalars(runs)),
            sampler_ids=list(session.scalars(samplers.order_by(tables.Sampler.sampling_session_seq_id))),
            user_metadata=text_values(row.user_metadata),
            display_name=row.display_name,
            project_id=row.project_id or DEFAULT_PROJECT,
            tags=row.tags,
        )

    return await service.read(read)


def _in_scope(query: Select[Any], who: Principal, scope: Scope) -> Select[Any]:
    query = query.where(visible(who, tables.Session))
    return query.filter(who.made()) if scope == "owned" else query


def _note(session: Session, who: Principal, event: str, target: str, project: str | None) -> None:
    detail = {"project_id": project or DEFAULT_PROJECT}
    audit.record(session, org_id=who.org_id, key_id=who.key_id, event=event, target=target, detail=detail)
