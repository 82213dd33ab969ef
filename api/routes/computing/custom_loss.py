"""Uploading a custom loss. The work is done when the request is answered; the future is there for Tinker's client."""

from __future__ import annotations

import hashlib
import uuid
from datetime import UTC, datetime
from functools import partial

import msgspec
from fastapi import APIRouter, Request
from sqlalchemy import select
from sqlalchemy.orm import Session
from weft.wire import CreateCustomLossRequest, CreateCustomLossResponse, UntypedAPIFuture

from api.checks.custom_losses import MAX_GRAPH_BYTES, MAX_LOSSES, checked_loss
from api.checks.runs import check_sequence
from api.errors import Invalid, TooLarge
from api.http.access import declare
from api.http.auth import PrincipalDep
from api.http.bodies import parse, read_body
from api.operations.paying import need_money, need_room
from api.state.service import ServiceDep
from api.who.may_change import active_session
from scheduler.journal.ending.outcomes import result_ref
from scheduler.links.messages import loss_ref
from scheduler.order.plans import BODY_ONLY
from store import tables

router = APIRouter(prefix="/api/v1")

KIND = "create_custom_loss"


@router.post(
    "/create_custom_loss", response_model_exclude_none=True, **declare(scope="train", limit="call", body="medium")
)
async def create_custom_loss(request: Request, service: ServiceDep, who: PrincipalDep) -> UntypedAPIFuture:
    """Keep a loss for the runs of its session. Idempotent on (session, custom_loss_seq_id)."""
    raw = await read_body(request)
    if len(raw) > MAX_GRAPH_BYTES:
        raise TooLarge(f"the body is {len(raw)} bytes, the limit of a custom loss is {MAX_GRAPH_BYTES}")
    body = await parse(service, raw, CreateCustomLossRequest)
    number = check_sequence(body.custom_loss_seq_id, "custom_loss_seq_id")
    if number >= MAX_LOSSES:
        raise Invalid(f"custom_loss_seq_id: {number}; a session may have {MAX_LOSSES} custom losses, from 0 on")
    await service.read(lambda session: active_session(session, who, body.session_id))
    stored = await service.threads.run(who.org_id, partial(checked_loss, body))
    lane, digest = f"{body.session_id}:loss", hashlib.sha256(raw).hexdigest()
    loss_id, request_id = f"{lane}:{number}", uuid.uuid4().hex
    now = datetime.now(UTC)
    row = tables.Operation(
        id=request_id,
        org_id=who.org_id,
        session_id=body.session_id,
        key_id=who.key_id,
        user_id=who.user_id,
        lane=lane,
        seq=number,
        kind=KIND,
        base_model="",
        state="done",
        tokens=0,
        body_ref=loss_ref(loss_id),
        body_bytes=len(stored),
        body_sha256=hashlib.sha256(stored).hexdigest(),
        sent_sha256=digest,
        plan=msgspec.to_builtins(BODY_ONLY),
        result_ref=result_ref(request_id),
        result_type="application/json",
        accepted_at=now,
        finished_at=now,
    )

    def write(session: Session) -> str:
        there = session.scalars(select(tables.Operation).filter_by(lane=lane, seq=number)).one_or_none()
        if there is None:
            need_money(session, who, session.get_one(tables.Session, body.session_id))
            need_room(session, who.org_id, service.settings.limits, "custom_losses")
            session.add(row)
            return request_id
        if there.sent_sha256 != digest:
            raise Invalid(f"custom_loss_seq_id: {number} is another loss already; use the next number")
        return there.id

    def put(request_id: str) -> None:
        """Put the blob after the row, so that of two requests at once one is stored; a repeat stores the same bytes
        again."""
        service.blobs.put(loss_ref(loss_id), stored)
        service.blobs.put(result_ref(request_id), CreateCustomLossResponse(loss_id=loss_id).model_dump_json().encode())

    accepted = await service.database.write(write, lock=who.org_id)
    await service.threads.run(who.org_id, partial(put, accepted))
    return UntypedAPIFuture(request_id=accepted)
