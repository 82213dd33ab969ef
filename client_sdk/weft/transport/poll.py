"""From a request id to its result: the long poll, until the operation is finished or has failed.

An operation that was accepted survives restarts of the server, so the poll outlives outages of up to
`RetryPolicy.outage_budget_s`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import httpx

from weft.errors import APIConnectionError, APIResponseValidationError, APIStatusError, RequestFailedError
from weft.transport.http import PROTOBUF, Call, Transport, error_of, is_page, status_of
from weft.transport.retry import Attempts
from weft.wire.error import WireError
from weft.wire.service import FutureRetrieveRequest

log = logging.getLogger("weft")

T = TypeVar("T")

#: A little longer than the server holds a poll.
POLL_TIMEOUT_S = 45.0
#: A "not yet" faster than this was no long poll; the client then pauses itself, so as not to hammer the server.
SHORTEST_ROUND_S = 0.05
#: How often a wait for room on the server is logged.
PAUSE_LOG_S = 60.0


async def fetch_result(transport: Transport, request_id: str, read: Callable[[httpx.Response], T]) -> T:
    """Poll until there is a result and `read` it. `RequestFailedError` if the operation failed."""
    body = FutureRetrieveRequest(request_id=request_id).model_dump_json().encode()
    accept = {"Accept": f"{PROTOBUF}, application/json"}
    call = Call("POST", "/retrieve_future", body, headers=accept, timeout_s=POLL_TIMEOUT_S, poll=True)
    attempts: Attempts | None = None
    while True:
        began = time.monotonic()
        failure: APIStatusError | APIConnectionError | None
        try:
            response = await transport.once(call)
            answered = response.is_success and not is_page(response)
            failure = None if answered or response.status_code == 408 else error_of(response)
        except (APIConnectionError, APIStatusError) as error:  # status errors: from exchanging the key for a token
            failure = error
        if failure is None:
            attempts = None
            if is_pending(response):
                _tell_pause(response)
                await asyncio.sleep(max(0.0, began + SHORTEST_ROUND_S - time.monotonic()))
                continue
            return _finish(response, request_id, read)
        attempts = attempts or Attempts(transport.poll_policy, began)
        await wait_or_raise(failure, attempts)


async def wait_or_raise(failure: APIStatusError | APIConnectionError, attempts: Attempts) -> None:
    """Wait until it is time to ask again; raise `failure` if it is final."""
    pause_s = attempts.pause_after(status_of(failure, restarts=True), time.monotonic())
    if pause_s is None:
        raise failure
    await asyncio.sleep(pause_s)


def is_pending(response: httpx.Response) -> bool:
    """True if the answer says "not yet": 408, or 200 with `type` try_again."""
    if response.status_code == 408:
        return True
    body = None if _is_protobuf(response) else _json(response)
    return isinstance(body, dict) and body.get("type") == "try_again"


_last_told_s = -PAUSE_LOG_S


def _tell_pause(response: httpx.Response) -> None:
    """Log, now and then, that the server holds us back, and why."""
    global _last_told_s
    body = _json(response)
    if not isinstance(body, dict) or body.get("queue_state", "active") == "active":
        return
    if time.monotonic() >= _last_told_s + PAUSE_LOG_S:
        _last_told_s = time.monotonic()
        log.warning("waiting: %s", body.get("queue_state_reason") or body["queue_state"])


def _finish(response: httpx.Response, request_id: str, read: Callable[[httpx.Response], T]) -> T:
    body = None if _is_protobuf(response) else _json(response)
    if isinstance(body, dict) and "error" in body:
        raise RequestFailedError(str(body["error"]), request_id, str(body.get("category", "unknown")))
    try:
        return read(response)
    except WireError as error:
        raise APIResponseValidationError(f"result of request {request_id}: {error}") from error


def _is_protobuf(response: httpx.Response) -> bool:
    return PROTOBUF in response.headers.get("content-type", "")


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return None
