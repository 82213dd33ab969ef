"""Results: one long poll for each, streams of tokens, and cancelling."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from functools import partial

import msgspec
import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel
from weft.wire import (
    CancelFutureRequest,
    FutureRetrieveRequest,
    RequestErrorCategory,
    RequestFailedResponse,
    TryAgainResponse,
)
from weft.wire.service import CancelFutureResponse, FutureMetadataResponse, StreamFutureRequest

from api.errors import ApiError, Gone, Invalid, NotFound, RateLimited, Unavailable, quote
from api.http.access import WORKING, declare
from api.http.auth import PrincipalDep
from api.http.bodies import read_json
from api.http.events import EventStream, event
from api.http.headers import Large, Ready
from api.http.json_forms import PROTOBUF, only_json, sample_result, train_result
from api.operations.streaming import Waited, whole
from api.state.counted import counted
from api.state.polls import COME_AGAIN_S
from api.state.service import Service, ServiceDep
from api.who.lookup import operation_by_id, plain_id
from api.who.may_change import own_operation
from api.who.principal import Principal
from scheduler.journal.ending.outcomes import JSON, LARGE_BYTES
from scheduler.links.messages import DrawnTokens
from scheduler.order import operations
from scheduler.order.operations import Outcome
from store import tables

router = APIRouter(prefix="/api/v1")

#: Tinker's client gives up a poll after 45 s.
LONGEST_POLL_S = 40.0
#: How many requests may stream one sample: each is told every token, and one client needs one.
MOST_READERS = 4


@router.post("/retrieve_future", **declare(scope=WORKING, limit="poll"))
async def retrieve_future(request: Request, service: ServiceDep, who: PrincipalDep) -> Response:
    """The outcome of an operation. While there is none, hold the request; then 408, on which clients ask again.

    A large result is announced by its size when the client allows that: it then asks again, once it has room for it."""
    body = await read_json(request, FutureRetrieveRequest)
    journal = service.journal
    if not plain_id(body.request_id):
        raise NotFound(f"no request {quote(body.request_id)}")
    if who.project_id is not None:  # the journal checks the organisation, not the project
        await service.read(lambda session: operation_by_id(session, who, body.request_id))
    stopped = operations.Waiting("active", "the server is restarting; the operation is kept")
    full = service.polls.full(who.org_id)  # an organisation beyond its share is not held, but told what there is
    wait_s = 0.0 if full else min(service.settings.long_poll_s, LONGEST_POLL_S)
    outcome = await service.polls.hold(who.org_id, journal.outcome(who.org_id, body.request_id, wait_s), stopped)
    if outcome is None:
        raise NotFound(f"no request {quote(body.request_id)}", request_id=body.request_id)
    if isinstance(outcome, operations.Gone):
        raise Gone(outcome.why, request_id=body.request_id)
    if isinstance(outcome, operations.Waiting):
        if full:
            raise service.polls.refusal(who.org_id)
        state, reason = outcome.state, outcome.reason
        return _json(TryAgainResponse(request_id=body.request_id, queue_state=state, queue_state_reason=reason), 408)
    if outcome.error is not None:
        category = RequestErrorCategory(outcome.category)
        await journal.tell_failure(who.org_id, body.request_id)
        return _json(RequestFailedResponse(error=outcome.error, category=category, request_id=body.request_id))
    size = outcome.size_bytes or len(outcome.payload)
    if body.allow_metadata_only and size > service.settings.limits.inline_result_bytes:
        return _json(FutureMetadataResponse(response_payload_size=size))
    as_json = outcome.content_type == PROTOBUF and only_json(request.headers.get("accept", ""))
    if size <= LARGE_BYTES and not as_json:
        service.fetched.note(who, [body.request_id])
        return Ready(outcome.payload, outcome.content_type)
    async with AsyncExitStack() as held:
        held.enter_context(service.polls.counted(who.org_id))
        await held.enter_async_context(service.large_results.room(who.org_id, size))
        outcome = await whole(service, who, body.request_id, outcome)
        if as_json:
            kind = await service.read(lambda session: session.get_one(tables.Operation, body.request_id).kind)
            outcome = await service.work(size, partial(_in_json, outcome.payload, kind))
        service.fetched.note(who, [body.request_id])
        return Large(outcome.payload, outcome.content_type, held.pop_all())


def _json(answer: BaseModel, status: int = 200) -> Response:
    return Ready(answer.model_dump_json().encode(), "application/json", status)


def _in_json(payload: bytes, kind: str) -> Outcome:
    form = sample_result(payload) if kind == operations.SAMPLE else train_result(payload)
    return Outcome(orjson.dumps(form), JSON)


@router.post("/stream_future", **declare(scope="sample", limit="poll"))
async def stream_future(request: Request, service: ServiceDep, who: PrincipalDep) -> Response:
    """The tokens of a sample, requested with `stream`, while they are drawn: server-sent events, each a `TokensDrawn`.
    The last is named `done` or `error`, when the result can be had (`retrieve_future`), or `open`: ask again."""
    body = await read_json(request, StreamFutureRequest)
    row = await service.read(lambda session: operation_by_id(session, who, body.request_id))
    if row.kind != operations.SAMPLE:
        raise Invalid(f"request_id: {body.request_id} is not a sample; only samples are streamed")
    service.polls.check(who.org_id)
    if service.readers[body.request_id] >= MOST_READERS:
        why = f"{MOST_READERS} requests stream the tokens of {body.request_id} already: end one, or read its result"
        raise RateLimited(why, reason="readers", retry_after_s=COME_AGAIN_S, scope="organisation")
    return EventStream(_events(service, who, body))


async def _events(service: Service, who: Principal, asked: StreamFutureRequest) -> AsyncGenerator[bytes, None]:
    try:
        with counted(service.readers, asked.request_id):
            async for part in Waited(service, who, asked.request_id).drawn(asked.timeout):
                if isinstance(part, DrawnTokens):
                    yield event(msgspec.json.encode(part))
    except (TimeoutError, Unavailable):
        yield event(b"{}", "open")
        return
    except ApiError as error:
        yield event(msgspec.json.encode({"detail": error.detail, "code": error.code}), "error")
        return
    yield event(b"{}", "done")


@router.post("/cancel_future", **declare(scope="sample", limit="poll"))
async def cancel_future(request: Request, service: ServiceDep, who: PrincipalDep) -> CancelFutureResponse:
    """End a sample now; its future gets the tokens that it has. Anything else, or too late, changes nothing."""
    body = await read_json(request, CancelFutureRequest)
    await service.read(lambda session: own_operation(session, who, body.request_id))
    return CancelFutureResponse(cancelled=await service.journal.cancel(who.org_id, body.request_id))
