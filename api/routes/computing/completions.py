"""One poll for all requests of a sampler: which of them have completed. Results are fetched one by one (`futures`).

The poll waits on an event of the journal. Only a feed that was never asked for since the server started is looked up
in the journal's rows, once.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial

import msgspec
from fastapi import APIRouter, Request, Response
from sqlalchemy import select
from sqlalchemy.orm import Session
from weft.wire.service import (
    FuturesRetrieveRequest,
    JoinSamplingSessionRequest,
    JoinSamplingSessionResponse,
)

from api.errors import Invalid
from api.http.access import WORKING, declare
from api.http.auth import PrincipalDep
from api.http.bodies import read_json
from api.routes.computing.futures import LONGEST_POLL_S
from api.state.service import Service, ServiceDep
from api.who.lookup import plain_id, sampler_by_id, visible
from api.who.may_change import is_own
from api.who.principal import Principal
from scheduler.journal.ending.completions import CLIENT_STRIDE, Completion, FeedKey
from scheduler.journal.front import OperationJournal
from store import tables

router = APIRouter(prefix="/api/v1")

MAX_ACKNOWLEDGED = 10_000
#: Results are kept for a day at most (`scheduler.journal.ending.results`); older completions are not reported.
LOOK_BACK = timedelta(hours=24)
#: The longest time between the writing of an operation's row and the moment when its completion gets a cursor.
SLACK = timedelta(seconds=60)


class _Finished(msgspec.Struct, tag_field="state", tag="finished"):
    request_id: str
    response_payload_uncompressed_size: int


class _Failed(msgspec.Struct, tag_field="state", tag="failed"):
    request_id: str


class _Answer(msgspec.Struct):
    """The body of a `weft.wire.FuturesRetrieveResponse`, as a msgspec struct: it may name thousands of requests, and is
    made ten times as fast."""

    completions: list[_Finished | _Failed]
    cursor: int


@router.post("/join_sampling_session", **declare(scope="sample", limit="call"))
async def join_sampling_session(
    request: Request, service: ServiceDep, who: PrincipalDep
) -> JoinSamplingSessionResponse:
    """A further client of a sampler gets a number that no other has; the one that made the sampler is 0."""
    body = await read_json(request, JoinSamplingSessionRequest)

    def write(session: Session) -> int:
        row = sampler_by_id(session, who, body.sampling_session_id)
        row.clients += 1
        return row.clients

    return JoinSamplingSessionResponse(client_counter=await service.database.write(write))


@router.post("/retrieve_futures", **declare(scope=WORKING, limit="poll", body="medium"))
async def retrieve_futures(request: Request, service: ServiceDep, who: PrincipalDep) -> Response:
    """Which requests of a sampler's client have completed since its cursor; waits while none has."""
    body = await read_json(request, FuturesRetrieveRequest)
    told = body.retrieved_request_ids
    if len(told) > MAX_ACKNOWLEDGED:
        raise Invalid(f"retrieved_request_ids: {len(told)} ids, the limit is {MAX_ACKNOWLEDGED}")
    key = FeedKey(who.org_id, body.target.sampling_session_id, body.target.cloned_sampler_id)
    journal = service.journal
    followed = journal.completions.follows(key)
    if not followed or who.project_id is not None:  # the journal checks the organisation, not the project
        await service.read(lambda session: sampler_by_id(session, who, key.sampler_id))
    looks = service.looks
    if key not in looks and not journal.completions.follows(key):
        looks[key] = asyncio.ensure_future(_follow(service, key, body.prev_cursor))
        looks[key].add_done_callback(lambda _: looks.pop(key))
    # finish the look first: otherwise a completion from now on could be told with a cursor beyond those that the look
    # finds
    if key in looks:
        await asyncio.shield(looks[key])
    if who.project_id is not None and told:
        told = await service.read(lambda session: _seen(session, who, told))
    service.fetched.note(who, filter(plain_id, told))
    delete = journal.answers.retrieved(who.org_id, [name for name in told if _may_drop(journal, who, name)])
    if delete:
        await service.threads.run(who.org_id, partial(_delete, service, delete))
    wait_s = min(service.settings.long_poll_s, LONGEST_POLL_S)
    if body.timeout is not None:
        wait_s = max(0.0, min(wait_s, body.timeout))
    # an organisation beyond its share is not held, but told what there is
    full = wait_s > 0 and service.polls.full(who.org_id)
    asked = journal.completions.after(key, body.prev_cursor, 0.0 if full else wait_s)
    nothing: tuple[list[Completion], int] = ([], body.prev_cursor)
    found, cursor = await service.polls.hold(who.org_id, asked, nothing)
    if full and not found:
        raise service.polls.refusal(who.org_id)
    answer = _Answer([_shown(completion) for completion in found], cursor)
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _seen(session: Session, who: Principal, request_ids: list[str]) -> list[str]:
    """The requests among these that `who` may see."""
    asked = [request_id for request_id in request_ids if plain_id(request_id)]
    query = select(tables.Operation.id).where(visible(who, tables.Operation), tables.Operation.id.in_(asked))
    return list(session.scalars(query))


def _may_drop(journal: OperationJournal, who: Principal, request_id: str) -> bool:
    """Whether `who` may say that the result is no longer needed: a colleague may still want it."""
    op = journal.answers.recent(request_id)
    return op is not None and is_own(who, op)


def _delete(service: Service, refs: list[str]) -> None:
    with suppress(OSError):  # they are deleted like other results that were fetched long ago
        for ref in refs:
            service.blobs.delete(ref)


def _shown(completion: Completion) -> _Finished | _Failed:
    if completion.size_bytes is None:
        return _Failed(completion.request_id)
    return _Finished(completion.request_id, completion.size_bytes)


async def _follow(service: Service, key: FeedKey, cursor: int) -> None:
    """Follow a feed, and add the completions from before."""
    service.journal.completions.follow(key, cursor)
    now, told = datetime.now(UTC), datetime.fromtimestamp(cursor / 1e6, UTC) - SLACK
    since = now - LOOK_BACK
    if told < now:  # otherwise the clock was set back, and later completions have earlier times
        since = max(since, told)
    first = key.client * CLIENT_STRIDE
    row = tables.Operation

    def read(session: Session) -> list[Completion]:
        mine = (row.lane == key.sampler_id, row.seq >= first, row.seq < first + CLIENT_STRIDE)
        query = select(row.id, row.result_bytes).where(*mine, row.finished_at >= since)
        ended = session.execute(query.order_by(row.finished_at)).all()
        # A result that is no longer kept looks failed here: fetching it says why.
        return [Completion(id, size_bytes) for id, size_bytes in ended]

    try:
        service.journal.completions.add(key, await service.read(read))
    except BaseException:  # otherwise the next poll would take later completions for all there are
        service.journal.completions.forget(key)
        raise
