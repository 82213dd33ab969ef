"""Making a run: operation 0 of its lane, together with its row.

Idempotent on (session, model_seq_id), which is what the run's id says, so a repeat is a repeat of operation 0.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy.orm import Session
from weft.wire import UntypedAPIFuture

from api.errors import Invalid
from api.operations.submit import Submitter, accept
from api.state.service import Service
from api.who.lookup import plain_id, run_by_id
from api.who.may_change import active_session
from api.who.principal import Principal
from scheduler.journal.accepting.numbers import known
from scheduler.links.messages import OpKind
from scheduler.order.operations import NewOperation
from scheduler.order.plans import Create
from store import tables


def run_id_of(session_id: str, seq: int) -> str:
    """The id of a run. Clients predict it, so its form is fixed."""
    return f"{session_id}:train:{seq}"


def check_session(session: Session, who: Principal, session_id: str, run_id: str) -> bool:
    """True if the run exists already, which makes the request a repeat. If it does not, raises unless the session
    accepts new runs."""
    if plain_id(run_id) and known(session, run_id, 0):
        run_by_id(session, who, run_id)
        return True
    active_session(session, who, session_id)
    if session.get(tables.Run, run_id) is not None:
        raise Invalid(f"model_seq_id: {run_id} is a copy of weights, which cannot be trained; use the next number")
    return False


async def create(
    service: Service,
    who: Principal,
    session_id: str,
    seq: int,
    plan: Create,
    metadata: dict[str, Any],
    raw: bytes,
) -> UntypedAPIFuture:
    now = datetime.now(UTC)
    spec = plan.spec
    facts = msgspec.structs.asdict(spec)
    run = tables.Run(
        id=facts.pop("run_id"),
        org_id=who.org_id,
        session_id=session_id,
        model_seq_id=seq,
        state="live",
        user_metadata=metadata,
        created_at=now,
        last_request_at=now,
        **facts,
    )
    new = NewOperation(who.org_id, session_id, spec.run_id, 0, OpKind.CREATE, spec.base_model, 0, raw, plan)
    submitter = await service.read(lambda session: Submitter.of(session, who, session_id))
    return UntypedAPIFuture(request_id=await accept(service, submitter, new, run), model_id=spec.run_id)


async def repeat(service: Service, who: Principal, session_id: str, run_id: str, raw: bytes) -> UntypedAPIFuture:
    """Answer a repeated creation like the first."""

    def read(session: Session) -> tuple[tables.Run, Submitter]:
        return run_by_id(session, who, run_id), Submitter.of(session, who, session_id)

    run, submitter = await service.read(read)
    new = NewOperation(who.org_id, session_id, run_id, 0, OpKind.CREATE, run.base_model, 0, raw)
    return UntypedAPIFuture(request_id=await accept(service, submitter, new, repeat=True), model_id=run_id)
