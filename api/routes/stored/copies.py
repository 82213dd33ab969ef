"""Copying weights: another name, in another project or session or organisation, for the same files."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Header, Request
from sqlalchemy import select
from sqlalchemy.orm import Session
from weft.wire import CopyWeightsRequest, CopyWeightsResponse

from api.checks.runs import check_sequence
from api.errors import Invalid, quote
from api.http.access import declare
from api.http.auth import PrincipalDep
from api.http.bodies import read_json
from api.operations.new_run import run_id_of
from api.operations.paying import need_money, need_room
from api.paths import CheckpointPath, parse_path
from api.state.service import ServiceDep
from api.who.lookup import readable_checkpoint, run_of
from api.who.may_change import active_session
from api.who.principal import Principal
from api.who.projects import check_project, project_for
from billing.metering import storage
from scheduler.journal.recovery import OF_SPEC
from store import tables
from store.database import audit

router = APIRouter(prefix="/api/v1")


@router.post("/copy_weights", **declare(scope="checkpoints:write", limit="call", meters="storage"))
async def copy_weights(
    request: Request,
    service: ServiceDep,
    who: PrincipalDep,
    x_tinker_weights_access_token: Annotated[str | None, Header()] = None,
) -> CopyWeightsResponse:
    """Copy a checkpoint into a new run that cannot be trained: of a new session in a project, or of a session.

    The copy keeps kind and name and shares the files; it never inherits when its source expires. A retry is known by
    (session, model_seq_id) or by its idempotency key, and gets the first answer."""
    body = await read_json(request, CopyWeightsRequest)
    source = parse_path(body.source_path, "source_path")
    token = body.weights_access_token or x_tinker_weights_access_token
    check_project(body.destination_project_id)
    if (body.destination_project_id is None) == (body.session_id is None):
        raise Invalid("destination_project_id, session_id: give one of them")
    retry_key = request.headers.get("x-idempotency-key")

    def write(session: Session) -> str:
        if body.session_id is not None:
            number = check_sequence(body.model_seq_id, "model_seq_id")
            run_id = run_id_of(body.session_id, number)
            owner = active_session(session, who, body.session_id)
        else:
            owner, number = _new_session(session, who, body.destination_project_id, retry_key), 0
            run_id = run_id_of(owner.id, number)
        there = _copied(session, run_id, source, body.source_path)
        if there is not None:
            return there
        need_money(session, who, owner)
        original = readable_checkpoint(session, who, source, token, keep=True)
        need_room(session, who.org_id, service.settings.limits, "stored_bytes", original.size_bytes)
        copy = _copy(session, who, owner, number, original, body.ttl_seconds)
        path = str(CheckpointPath(copy.run_id, copy.kind, copy.name))
        detail = {"source_path": str(source)}
        audit.record(
            session, org_id=who.org_id, key_id=who.key_id, event="checkpoint_copied", target=path, detail=detail
        )
        return path

    return CopyWeightsResponse(tinker_path=await service.database.write(write, lock=who.org_id))


def _new_session(session: Session, who: Principal, project_id: str | None, retry_key: str | None) -> tables.Session:
    """A session that has ended already: it only holds the copy, which counts for its project."""
    unique = f"copy_weights {who.domain} {retry_key}"
    session_id = str(uuid.uuid5(uuid.NAMESPACE_OID, unique) if retry_key else uuid.uuid4())
    there = session.get(tables.Session, session_id)
    if there is not None:
        return there
    now = datetime.now(UTC)
    made = tables.Session(
        id=session_id,
        org_id=who.org_id,
        key_id=who.key_id,
        user_id=who.user_id,
        state="finished",
        sdk_version="",
        display_name=None,
        project_id=project_for(session, who, project_id),
        tags=[],
        user_metadata={},
        finish_reason="success",
        created_at=now,
        last_seen_at=now,
        ended_at=now,
    )
    session.add(made)
    session.flush()
    return made


def _copied(session: Session, run_id: str, source: CheckpointPath, source_path: str) -> str | None:
    """The path of an earlier copy of the same source into this run; None if there is no such run."""
    run = session.get(tables.Run, run_id)
    if run is None:
        return None
    if run.user_metadata.get("copied_from") != source_path:
        raise Invalid(f"model_seq_id: {run.model_seq_id} is another run of session {run.session_id}; use the next one")
    found = session.scalars(select(tables.Checkpoint).filter_by(run_id=run_id, kind=source.kind)).first()
    if found is None:
        raise Invalid(f"the copy {quote(run_id)} was made and deleted; copy under a new number")
    return str(CheckpointPath(run_id, found.kind, found.name))


def _copy(
    session: Session,
    who: Principal,
    owner: tables.Session,
    number: int,
    original: tables.Checkpoint,
    ttl_seconds: int | None,
) -> tables.Checkpoint:
    """Make a closed run like the source's, and in it a checkpoint on the same folder."""
    now = datetime.now(UTC)
    source = run_of(session, original)
    run = tables.Run(
        id=run_id_of(owner.id, number),
        org_id=who.org_id,
        session_id=owner.id,
        model_seq_id=number,
        state="closed",
        user_metadata={"copied_from": str(CheckpointPath(original.run_id, original.kind, original.name))},
        created_at=now,
        last_request_at=now,
        **{name: getattr(source, name) for name in OF_SPEC},
    )
    session.add(run)
    session.flush()
    made = tables.Checkpoint(
        id=uuid.uuid4().hex,
        org_id=who.org_id,
        run_id=run.id,
        kind=original.kind,
        name=original.name,
        ref=original.ref,
        size_bytes=original.size_bytes,
        public=False,
        user_metadata=dict(original.user_metadata) if original.org_id == who.org_id else {},
        created_at=now,
        expires_at=now + timedelta(seconds=ttl_seconds) if ttl_seconds else None,
    )
    session.add(made)
    session.flush()
    storage.begin(session, made, now)
    return made
