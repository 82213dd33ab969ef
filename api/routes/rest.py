"""Listing and managing what is stored: runs, checkpoints, sessions. For RestClient and the command line."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from sqlalchemy import Select, func, or_, select
from sqlalchemy.orm import Session
from weft.wire import SetTtlRequest

from api.auth import PrincipalDep
from api.bodies import read_json
from api.lookup import checkpoint_at, run_by_id, session_by_id
from api.paths import KINDS, CheckpointPath, parse_path
from api.state import ServiceDep
from api.validate.runs import check_text, check_ttl
from scheduler.messages import OpKind
from store import tables

router = APIRouter(prefix="/api/v1")

Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, le=2**31)]
#: Within one organisation everybody sees everything, so both scopes are the same.
Scope = Literal["owned", "accessible"]


@router.get("/training_runs")
async def training_runs(
    service: ServiceDep,
    who: PrincipalDep,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: Scope = "owned",
    project_id: str | None = None,
) -> dict[str, Any]:
    """Runs of the organisation, newest first."""

    def read(session: Session) -> dict[str, Any]:
        query = select(tables.Run).filter_by(org_id=who.org_id)
        check_text(project_id, "project_id", 64)
        if project_id is not None:
            owner = tables.Session.id == tables.Run.session_id
            query = query.join(tables.Session, owner).where(tables.Session.project_id == project_id)
        total = _count(session, query)
        page = session.scalars(query.order_by(tables.Run.created_at.desc(), tables.Run.id).limit(limit).offset(offset))
        return {"training_runs": _describe_runs(session, page.all()), "cursor": _cursor(offset, limit, total)}

    return await service.read(read)


@router.get("/training_runs/{run_id}")
async def training_run(run_id: str, service: ServiceDep, who: PrincipalDep) -> dict[str, Any]:
    return await service.read(lambda session: _describe_runs(session, [run_by_id(session, who.org_id, run_id)])[0])


@router.get("/training_runs/{run_id}/checkpoints")
async def run_checkpoints(run_id: str, service: ServiceDep, who: PrincipalDep) -> dict[str, Any]:
    """All checkpoints of a run, oldest first."""

    def read(session: Session) -> dict[str, Any]:
        run_by_id(session, who.org_id, run_id)
        rows = session.scalars(_live().filter_by(org_id=who.org_id, run_id=run_id).order_by(*_OLDEST_FIRST))
        return {"checkpoints": [_describe(row) for row in rows]}

    return await service.read(read)


@router.get("/checkpoints")
async def checkpoints(service: ServiceDep, who: PrincipalDep, limit: Limit = 100, offset: Offset = 0) -> dict[str, Any]:
    """Checkpoints of the organisation, newest first."""

    def read(session: Session) -> dict[str, Any]:
        query = _live().filter_by(org_id=who.org_id)
        total = _count(session, query)
        newest = (tables.Checkpoint.created_at.desc(), tables.Checkpoint.id)
        rows = session.scalars(query.order_by(*newest).limit(limit).offset(offset))
        return {"checkpoints": [_describe(row) for row in rows], "cursor": _cursor(offset, limit, total)}

    return await service.read(read)


@router.put("/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl")
async def set_ttl(
    run_id: str, kind: str, name: str, request: Request, service: ServiceDep, who: PrincipalDep
) -> dict[str, Any]:
    """Let a checkpoint expire so many seconds from now, or (null) never."""
    path = parse_path(f"tinker://{run_id}/{kind}/{name}", "path")
    body = await read_json(request, SetTtlRequest)
    check_ttl(body.ttl_seconds)
    ttl = body.ttl_seconds
    expires = None if ttl is None else datetime.now(UTC) + timedelta(seconds=ttl)

    def write(session: Session) -> None:
        checkpoint_at(session, who.org_id, path).expires_at = expires

    await service.database.write(write)
    return {"expires_at": expires}


@router.delete("/training_runs/{run_id}/checkpoints/{kind}/{name}")
async def delete_checkpoint(
    run_id: str, kind: str, name: str, service: ServiceDep, who: PrincipalDep
) -> dict[str, str]:
    """Delete a checkpoint. It is gone at once; its files stay for as long as something that runs needs them."""
    path = parse_path(f"tinker://{run_id}/{kind}/{name}", "path")

    def write(session: Session) -> str | None:
        row = checkpoint_at(session, who.org_id, path)
        session.delete(row)
        return None if _in_use(session, row.ref) else row.ref

    free = await service.database.write(write)
    if free is not None:
        service.blobs.delete_tree(free)
    return {"status": "deleted"}


@router.get("/sessions")
async def sessions(
    service: ServiceDep,
    who: PrincipalDep,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: Scope = "owned",
) -> dict[str, Any]:
    """Ids of the organisation's sessions, newest first."""

    def read(session: Session) -> dict[str, Any]:
        query = select(tables.Session.id).filter_by(org_id=who.org_id)
        newest = (tables.Session.created_at.desc(), tables.Session.id)
        return {"sessions": list(session.scalars(query.order_by(*newest).limit(limit).offset(offset)))}

    return await service.read(read)


@router.get("/sessions/{session_id}")
async def session_details(
    session_id: str, service: ServiceDep, who: PrincipalDep, access_scope: Scope = "owned"
) -> dict[str, Any]:
    def read(session: Session) -> dict[str, Any]:
        row = session_by_id(session, who.org_id, session_id)
        runs = select(tables.Run.id).filter_by(session_id=row.id).order_by(tables.Run.model_seq_id)
        samplers = select(tables.Sampler.id).filter_by(session_id=row.id)
        return {
            "training_run_ids": list(session.scalars(runs)),
            "sampler_ids": list(session.scalars(samplers.order_by(tables.Sampler.sampling_session_seq_id))),
            "user_metadata": _text_values(row.user_metadata),
            "display_name": row.display_name,
        }

    return await service.read(read)


_OLDEST_FIRST = (tables.Checkpoint.created_at, tables.Checkpoint.id)


def _live() -> Select[Any]:
    """Checkpoints that have not expired."""
    expires = tables.Checkpoint.expires_at
    return select(tables.Checkpoint).where(or_(expires.is_(None), expires > datetime.now(UTC)))


def _count(session: Session, query: Select[Any]) -> int:
    return session.scalar(select(func.count()).select_from(query.subquery())) or 0


def _cursor(offset: int, limit: int, total: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": total}


def _in_use(session: Session, ref: str) -> bool:
    """Whether a sampler reads these files, or a live run would be rebuilt from them."""
    sampler = (
        select(tables.Sampler.id)
        .join(tables.Session, tables.Session.id == tables.Sampler.session_id)
        .where(tables.Sampler.adapter_ref == ref, tables.Session.state == "active")
    )
    loaded = (
        select(tables.Operation.id)
        .join(tables.Run, tables.Run.id == tables.Operation.lane)
        .where(
            tables.Operation.kind.in_([OpKind.CREATE.value, OpKind.LOAD_STATE.value]),
            tables.Operation.plan["source_ref"].as_string() == ref,
            tables.Run.state == "live",
        )
    )
    return any(session.scalars(query.limit(1)).first() is not None for query in (sampler, loaded))


def _describe(row: tables.Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{row.kind}/{row.name}",
        "checkpoint_type": KINDS[row.kind],
        "time": row.created_at,
        "tinker_path": str(CheckpointPath(row.run_id, row.kind, row.name)),
        "size_bytes": row.size_bytes,
        "public": row.public,
        "user_metadata": _text_values(row.user_metadata),
        "expires_at": row.expires_at,
    }


def _describe_runs(session: Session, runs: Sequence[tables.Run]) -> list[dict[str, Any]]:
    """Runs as clients see them, with three queries for all of them together."""
    ids = [run.id for run in runs]
    names = select(tables.Organisation.id, tables.Organisation.name)
    names = names.where(tables.Organisation.id.in_({run.org_id for run in runs}))
    owners: dict[str, str] = {row.id: row.name for row in session.execute(names)}
    latest: dict[tuple[str, str], tables.Checkpoint] = {}
    for row in session.scalars(_live().where(tables.Checkpoint.run_id.in_(ids)).order_by(*_OLDEST_FIRST)):
        latest[row.run_id, row.kind] = row
    asked = select(tables.Operation.lane, func.max(tables.Operation.accepted_at).label("at"))
    asked = asked.where(tables.Operation.lane.in_(ids)).group_by(tables.Operation.lane)
    last_asked: dict[str, datetime] = {row.lane: row.at for row in session.execute(asked)}
    return [_describe_run(run, owners, latest, last_asked.get(run.id)) for run in runs]


def _describe_run(
    run: tables.Run,
    owners: dict[str, str],
    latest: dict[tuple[str, str], tables.Checkpoint],
    asked: datetime | None,
) -> dict[str, Any]:
    weights, sampler = latest.get((run.id, "weights")), latest.get((run.id, "sampler_weights"))
    return {
        "training_run_id": run.id,
        "base_model": run.base_model,
        "model_owner": owners[run.org_id],
        "is_lora": True,
        "corrupted": False,
        "lora_rank": run.rank,
        "last_request_time": asked or run.last_request_at,
        "last_checkpoint": _describe(weights) if weights else None,
        "last_sampler_checkpoint": _describe(sampler) if sampler else None,
        "user_metadata": _text_values(run.user_metadata),
    }


def _text_values(metadata: dict[str, Any]) -> dict[str, str]:
    """Clients read metadata back as text, whatever they stored."""
    return {str(key): value if isinstance(value, str) else str(value) for key, value in metadata.items()}
