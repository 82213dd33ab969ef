"""The service itself: what clients ask first, their sessions, and what this server can do."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from sqlalchemy import select
from sqlalchemy.orm import Session
from weft.wire import CreateSessionRequest, FinishSessionRequest, SessionHeartbeatRequest

from api.auth import PrincipalDep
from api.bodies import read_body, read_json
from api.errors import Invalid, SessionEnded
from api.lookup import session_by_id
from api.state import ServiceDep
from api.validate.runs import check_metadata, check_text
from store import tables

router = APIRouter(prefix="/api/v1")

MAX_TAGS = 64
#: Tinker's client cuts data into chunks of so many; within our limits, chunks as large as possible share best.
CHUNK_DATA = 1024
CHUNK_BYTES = 5_000_000


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@router.post("/client/config")
async def client_config(request: Request, service: ServiceDep, who: PrincipalDep) -> dict[str, Any]:
    """How clients should behave. Whatever is not named here keeps the client's own default."""
    await read_body(request)
    limits = service.settings.limits
    return {
        "pjwt_auth_enabled": False,
        "parallel_fwdbwd_chunks": True,
        "proto_compress_fwdbwd": False,
        "fwdbwd_max_chunk_len": min(CHUNK_DATA, limits.max_data),
        "fwdbwd_max_chunk_bytes_count": min(CHUNK_BYTES, limits.max_body_bytes // 2),
        "sample_use_retrieve_futures": False,
        "custom_loss_server_side": False,
        "sample_join_sampling_session": False,
    }


@router.post("/client/dynamic_config")
async def client_dynamic_config(request: Request, who: PrincipalDep) -> dict[str, Any]:
    await read_body(request)
    return {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}


@router.get("/get_server_capabilities")
async def get_server_capabilities(service: ServiceDep, who: PrincipalDep) -> dict[str, Any]:
    longest = service.settings.limits.max_seq_len
    models = [
        {
            "model_name": card.name,
            "max_context_length": min(card.context_length, longest),
            "trainable": True,
            "sampleable": True,
        }
        for card in service.cards.values()
    ]
    return {"supported_models": models}


@router.get("/auth/apikey/me")
async def apikey_me(service: ServiceDep, who: PrincipalDep) -> dict[str, Any]:
    """The key that asks: its public prefix and its organisation."""

    def read(session: Session) -> tuple[str, str]:
        key = session.get_one(tables.ApiKey, who.key_id)
        return key.prefix, session.get_one(tables.Organisation, who.org_id).name

    prefix, org_name = await service.read(read)
    details = {"org_details": {"name": org_name}, "user_details": {"email": None}}
    return {"key_id": who.key_id, "name": prefix, "note": None, "details": details}


@router.post("/create_session")
async def create_session(request: Request, service: ServiceDep, who: PrincipalDep) -> dict[str, Any]:
    """A new session. A retry is known by its idempotency key, from which the id then follows."""
    body = await read_json(request, CreateSessionRequest)
    if len(body.tags) > MAX_TAGS:
        raise Invalid(f"tags: {len(body.tags)} tags, the limit is {MAX_TAGS}")
    now = datetime.now(UTC)
    key = request.headers.get("x-idempotency-key")
    new = tables.Session(
        id=str(uuid.uuid5(uuid.NAMESPACE_OID, f"{who.org_id} {key}") if key else uuid.uuid4()),
        org_id=who.org_id,
        state="active",
        sdk_version=check_text(body.sdk_version, "sdk_version", 64),
        display_name=check_text(body.display_name, "display_name", 256),
        project_id=check_text(body.project_id, "project_id", 64),
        tags=[check_text(tag, f"tags.{index}", 256) for index, tag in enumerate(body.tags)],
        user_metadata=check_metadata(body.user_metadata),
        created_at=now,
        last_seen_at=now,
    )

    def write(session: Session) -> None:
        if session.get(tables.Session, new.id) is None:
            session.add(new)

    await service.database.write(write)
    return {"type": "create_session", "session_id": new.id}


@router.post("/session_heartbeat")
async def session_heartbeat(request: Request, service: ServiceDep, who: PrincipalDep) -> dict[str, str]:
    """Keeps a session alive. 410 once it has ended is how its clients learn of it."""
    body = await read_json(request, SessionHeartbeatRequest)
    now = datetime.now(UTC)

    def write(session: Session) -> None:
        row = session_by_id(session, who.org_id, body.session_id)
        if row.state != "active":
            raise SessionEnded(f"session {row.id} has ended ({row.state}): create a new one")
        row.last_seen_at = now

    await service.database.write(write)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish")
async def finish_session(session_id: str, request: Request, service: ServiceDep, who: PrincipalDep) -> dict[str, str]:
    """The client is done: what is queued still runs, then its runs are forgotten. The first reason stands."""
    body = await read_json(request, FinishSessionRequest)

    def write(session: Session) -> list[str]:
        row = session_by_id(session, who.org_id, session_id)
        if row.state == "active":
            row.state, row.finish_reason = "finished", body.reason.type
        return list(session.scalars(select(tables.Run.id).filter_by(session_id=row.id)))

    for run_id in await service.database.write(write):
        service.journal.close_run(run_id)
    return {"status": "finished"}


@router.post("/telemetry")
async def telemetry(request: Request, who: PrincipalDep) -> dict[str, str]:
    """Clients report what they do; it is received, and nothing of it is kept."""
    await read_body(request)
    return {"status": "accepted"}
