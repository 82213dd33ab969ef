"""What was sampled under a client's own session id (`X-Session-ID`): prompts, tokens, logprobs and policy versions, in
order, so that the conversations of any program can be trained on. Kept for a day; a session has at most so many, and an
organisation at most so many bytes of them (quota `turn_bytes`)."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import accumulate

import msgspec
import orjson
import zstandard
from sqlalchemy import ColumnElement, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from weft.wire.turns import Turn

from api.errors import Invalid, OverQuota
from api.routes.openai.models import Target
from api.state.service import ComingTurn, Service
from api.state.threads import Threads
from api.who.principal import Principal
from billing.metering.quotas import QuotaReached, check, claim
from scheduler.journal.storing import until_stored
from store import tables
from store.blobs.room import what_failed

log = logging.getLogger(__name__)

#: How many turns a session may have, and how long its name may be.
MAX_TURNS = 4096
MAX_NAME = 128
#: How many bytes an answer that lists turns may have; it always contains those of the first request.
PAGE_BYTES = 4 << 20
#: Answers that list turns are written one at a time for each organisation.
_threads = Threads(1)
#: How many prompt tokens the turns of one request may have together: each choice's turn contains the whole prompt.
MOST_READ = 1 << 22
#: The most bytes that a packed turn takes: for each prompt token, for each sampled token with its logprob, and besides.
PER_READ, PER_DRAWN, PER_TURN = 5, 14, 1024


async def make_room(
    service: Service, who: Principal, name: str, read: int, drawn: int, choices: int, before: int = 0
) -> ComingTurn:
    """Reserve quota for the turns of one prompt: `choices` turns of `read` tokens and at most `drawn` more, after
    `before` others of the same request. Raises Invalid for a bad session name, or if the session has as many turns as
    it may; OverQuota if the turns could exceed the organisation's quota."""
    if not 1 <= len(name) <= MAX_NAME or not (name.isascii() and name.isprintable()):
        raise Invalid(f"x-session-id: must be 1 to {MAX_NAME} printable ASCII characters, got {len(name)}")
    if choices * read > MOST_READ:
        raise Invalid(
            f"x-session-id: the turns of this request would have {choices * read:,} tokens of prompts (n x prompt), "
            f"the limit is {MOST_READ:,}: ask for fewer choices in each request, or without a session"
        )
    count = await service.read(lambda session: session.scalar(select(func.count()).where(*turns_of(who, name))))
    if (count := (count or 0) + before) >= MAX_TURNS:
        raise Invalid(f"x-session-id: this session has {count} turns, the limit is {MAX_TURNS}; begin another one")
    turn = ComingTurn(who.org_id, choices * (read * PER_READ + drawn * PER_DRAWN + PER_TURN))
    coming = sum(other.size_bytes for other in service.turns_coming if other.org_id == who.org_id)
    asked = claim(service.settings.limits, "turn_bytes", turn.size_bytes)
    service.turns_coming.add(turn)
    try:
        await service.read(lambda session: check(session, who.org_id, asked, coming))
    except BaseException as error:
        service.turns_coming.discard(turn)
        if isinstance(error, QuotaReached):
            raise OverQuota(error) from None
        raise
    return turn


def turns_of(who: Principal, name: str) -> tuple[ColumnElement[bool], ...]:
    """The turns of a session that `who` may see, for `where`."""
    row = tables.SessionTurn
    own = (row.org_id == who.org_id, row.name == name)
    return own if who.project_id is None else (*own, row.project_id == who.project_id)


async def record(
    service: Service, who: Principal, name: str, target: Target, request_id: str, turns: Iterable[Turn]
) -> None:
    """Store the turns of one request, trying for as long as it takes: the request is billed, so it must not fail. A
    repeat is recognised by `request_id`. The turns are made and packed in a thread, one after another: together they
    may be millions of numbers."""
    ref = f"turns/{request_id[:2]}/{request_id}"

    def pack() -> tuple[bytes, int]:
        packed = msgspec.msgpack.encode([msgspec.Raw(msgspec.msgpack.encode(turn.model_dump())) for turn in turns])
        return zstandard.compress(packed), len(packed)

    compressed, size_bytes = await service.threads.run(who.org_id, pack)

    def write(session: Session) -> None:
        if session.scalar(select(tables.SessionTurn.id).filter_by(request_id=request_id)) is None:
            session.add(
                tables.SessionTurn(
                    request_id=request_id,
                    org_id=who.org_id,
                    project_id=target.submitter.project_id,
                    name=name,
                    ref=ref,
                    size_bytes=size_bytes,
                    created_at=datetime.now(UTC),
                )
            )

    async def attempt() -> None:
        # a repeat puts the same bytes
        await service.threads.run(who.org_id, lambda: service.blobs.put(ref, compressed))
        with suppress(IntegrityError):  # another replica has just recorded the same turns
            await service.database.write(write)

    def refused(error: Exception, pause_s: float) -> None:
        log.warning("the turns of %s: %s; again in %.1f s", request_id, what_failed(error), pause_s)

    await until_stored(attempt, refused)


def page_of(rows: Sequence[tables.SessionTurn]) -> Sequence[tables.SessionTurn]:
    """The first of these rows, as many as fit into one answer."""
    size = list(accumulate(row.size_bytes for row in rows))
    return rows[: max(1, bisect_right(size, PAGE_BYTES))]


async def told(service: Service, who: Principal, rows: Sequence[tables.SessionTurn]) -> bytes:
    """The turns of these requests, as JSON without the list's brackets. Written in a thread: they may be millions of
    numbers, of which only one turn's are Python objects at a time."""

    def write() -> bytes:
        return b",".join(turn for row in rows for turn in _written(service, row.ref))

    return await _threads.run(who.org_id, write)


def _written(service: Service, ref: str) -> Iterable[bytes]:
    """The turns of one request as JSON; none if they are no longer kept. One turn at a time, because each step holds
    the interpreter, and so the event loop, for as long as it takes."""
    try:
        packed = zstandard.decompress(service.blobs.get(ref))
    except FileNotFoundError:
        return
    for turn in msgspec.msgpack.decode(packed, type=list[msgspec.Raw]):
        yield orjson.dumps(msgspec.msgpack.decode(turn))
