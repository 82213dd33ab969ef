"""What was sampled under a client's own session id (`X-Session-ID`): prompts, tokens, logprobs and policy versions, in
order, so that the conversations of any program can be trained on. Kept for a day and for a number of turns."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import zstandard
from sqlalchemy import ColumnElement, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool
from weft.wire.sample_codec import SampleResult
from weft.wire.turns import Turn

from api.errors import Invalid
from api.routes.openai.models import Target
from api.state.service import Service
from api.who.principal import Principal
from store import tables

#: Turns of one session, and sessions' names.
MAX_TURNS = 4096
MAX_NAME = 128


async def check_session(service: Service, who: Principal, name: str) -> None:
    """Raises Invalid for a name that is none, and for a session that has as many turns as it may."""
    if not 1 <= len(name) <= MAX_NAME or not (name.isascii() and name.isprintable()):
        raise Invalid(f"x-session-id: must be 1 to {MAX_NAME} printable ASCII characters, got {len(name)}")
    count = await service.read(lambda session: session.scalar(select(func.count()).where(*turns_of(who, name))))
    if (count or 0) >= MAX_TURNS:
        raise Invalid(f"x-session-id: this session has {count} turns, the limit is {MAX_TURNS}; begin another one")


def turns_of(who: Principal, name: str) -> tuple[ColumnElement[bool], ...]:
    """The turns of a session that `who` sees, for `where`."""
    row = tables.SessionTurn
    own = (row.org_id == who.org_id, row.name == name)
    return own if who.project_id is None else (*own, row.project_id == who.project_id)


async def record(
    service: Service,
    who: Principal,
    name: str,
    target: Target,
    request_id: str,
    prompt: list[int],
    result: SampleResult,
) -> None:
    """Keep a turn: a repeat is known by its request."""
    now = datetime.now(UTC)
    turns = [
        Turn(
            request_id=request_id,
            choice=choice,
            model=target.name,
            at=now.timestamp(),
            prompt=prompt,
            tokens=sequence.tokens.tolist(),
            logprobs=sequence.logprobs.tolist() if sequence.logprobs is not None else [],
            versions=[(span.version, span.length) for span in sequence.policy],
            stop_reason=sequence.stop_reason,
        )
        for choice, sequence in enumerate(result.sequences)
    ]
    ref = f"turns/{request_id[:2]}/{request_id}"
    written = zstandard.compress(msgspec.msgpack.encode([turn.model_dump() for turn in turns]))
    row = tables.SessionTurn(
        request_id=request_id,
        org_id=who.org_id,
        project_id=target.submitter.project_id,
        name=name,
        ref=ref,
        created_at=now,
    )

    def write(session: Session) -> None:
        if session.scalar(select(tables.SessionTurn.id).filter_by(request_id=request_id)) is None:
            session.add(row)

    await run_in_threadpool(service.blobs.put, ref, written)  # of a repeat, the same
    try:
        await service.database.write(write)
    except IntegrityError:  # another replica has just recorded it
        return


def read_turns(service: Service, ref: str) -> list[Turn]:
    """Turns of one request; none once they are no longer kept."""
    try:
        packed = service.blobs.get(ref)
    except FileNotFoundError:
        return []
    return [Turn.model_validate(turn) for turn in msgspec.msgpack.decode(zstandard.decompress(packed))]
