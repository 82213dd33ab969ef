"""Everything that the API refuses, as one tree of exceptions and one JSON form.

The statuses follow what Tinker's SDK does with them: it retries 408, 409, 429 and 5xx for minutes, pauses for up to an
hour on 402, and takes a 400 without a body for a proxy's. So a permanent mistake is never one of those, and every
answer has a body: {"detail", "code", "request_id"}: the operation's that is meant, else the HTTP request's own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from sqlalchemy.exc import OperationalError, TimeoutError as PoolTimeout
from weft.money import dollars
from weft.wire.checks.problem import Problem
from weft.wire.shown import quote as quote

from billing.metering.quotas import QuotaReached
from billing.money.accounts import OutOfMoney
from store import logs
from store.blobs.contract import is_lasting
from store.blobs.room import what_failed

log = logging.getLogger("weft.api")

#: The key in a request's scope under which a poll's guard leaves the principal that asks: polls that find nothing are
#: counted for that principal.
POLLS = "weft.polls"
#: How many mistakes of one body are listed one by one.
MAX_EXPLAINED = 1000

#: Errors of the database and of the disk.
STORES = (OperationalError, PoolTimeout, OSError)

_OPENAI_TYPES = {
    401: "authentication_error",
    402: "insufficient_quota",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """A request that is not carried out. `detail` says what, which input, the limit and the value, what to do next."""

    status = 500
    code = "internal"
    #: Headers of all errors of this class, and amounts beside the text.
    every: Mapping[str, str] = {}
    amounts: Mapping[str, int] = {}

    def __init__(self, detail: str, *, request_id: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.request_id = request_id
        self.headers = {**self.every, **(headers or {})}

    def response(self) -> Response:
        body = {**body_of(self.detail, self.code, self.request_id), **self.amounts}
        return JSONResponse(body, self.status, self.headers)


def body_of(detail: str, code: str, request_id: str | None = None) -> dict[str, Any]:
    """The JSON of a refusal. Without an operation's `request_id` it contains that of the HTTP request."""
    request_id = request_id or logs.about().get("request")
    return {"detail": detail, "code": code} | ({"request_id": request_id} if request_id else {})


class Invalid(ApiError):
    """The request can never succeed as it is."""

    status = 400
    code = "invalid_request"


class Unauthenticated(ApiError):
    status = 401
    code = "unauthenticated"


class InvalidToken(Unauthenticated):
    """A token that is not valid, or no longer. On this header clients exchange their key for another one."""

    code = "invalid_token"
    every: Mapping[str, str] = {"www-authenticate": 'Bearer error="invalid_token"'}


class Forbidden(ApiError):
    """The key is good, but may not do this. Never for another organisation's things: those are not found."""

    status = 403
    code = "forbidden"

    def __init__(self, detail: str, *, code: str = "forbidden") -> None:
        super().__init__(detail)
        self.code = code


class NotFound(ApiError):
    """Unknown, or another organisation's: the two look alike."""

    status = 404
    code = "not_found"


class NoMethod(ApiError):
    """The path is there, for other methods."""

    status = 405
    code = "method_not_allowed"


class NotHere(ApiError):
    """Something of the protocol that this server does not have."""

    status = 404
    code = "not_supported"


class SessionEnded(ApiError):
    """410 for a heartbeat, whose loop in the client then stops. No other route answers so: clients would resubmit on
    410."""

    status = 410
    code = "session_ended"


class Gone(ApiError):
    """The operation had a result that is no longer kept. Clients then sample again."""

    status = 410
    code = "gone"


class TooLarge(ApiError):
    """The body is too large. `begins` has its first bytes, if they were read: they may say which operation it is."""

    status = 413
    code = "body_too_large"

    def __init__(self, detail: str, begins: bytes = b"") -> None:
        super().__init__(detail)
        self.begins = begins


class Unreadable(ApiError):
    """The body is of a kind that this endpoint does not take."""

    status = 415
    code = "unsupported_media_type"


class Malformed(ApiError):
    """The body does not have the fields that it must have."""

    status = 422
    code = "malformed"

    def __init__(self, detail: str, param: str | None = None) -> None:
        super().__init__(detail)
        self.param = param


class PaymentRequired(ApiError):
    """A limit on money does not allow what the operation can cost. Clients wait and ask again, with the same sequence
    number, so it goes on after a top-up; `needed`, `available` and `held` are nano-USD."""

    status = 402
    code = "out_of_money"

    def __init__(self, why: OutOfMoney) -> None:
        needed, available, held = (dollars(n) for n in (why.needed_nusd, why.available_nusd, why.held_nusd))
        figures = f"it can cost {needed}, available are {available} beside {held} held for operations that run"
        if not why.needed_nusd:
            figures = "it is used up, and so nothing is accepted, not even what costs nothing itself"
        super().__init__(
            f"{why.limit} does not allow this operation: {figures} ({why.figures}); {why.remedy}. The operation was "
            "not accepted: send it again"
        )
        self.scope = why.scope
        self.amounts = {
            "needed_nusd": why.needed_nusd,
            "available_nusd": why.available_nusd,
            "held_nusd": why.held_nusd,
        }


class Busy(ApiError):
    """The organisation has as much queued as it may. Clients try again with the same sequence number."""

    status = 429
    code = "queue_full"
    every: Mapping[str, str] = {"retry-after": "1"}


class OverQuota(ApiError):
    """The organisation has as much of something as it may: the text names the quota and what makes room. Clients wait
    and send the same request again, unless this alone is more than the quota."""

    status = 429
    code = "quota_reached"

    def __init__(self, why: QuotaReached) -> None:
        super().__init__(str(why), headers={"x-weft-limit-scope": "organisation"})
        self.for_ever = not why.ever
        if self.for_ever:
            self.status = TooLarge.status
        else:
            self.headers["retry-after"] = "10"


class RateLimited(ApiError):
    """Too much in a minute, or at a time, for a limit of the key, the project or the organisation: the text and a
    header say which. Clients wait as long as they are told."""

    status = 429
    code = "rate_limited"

    def __init__(self, detail: str, *, reason: str, retry_after_s: int, scope: str) -> None:
        self.reason = reason
        super().__init__(detail, headers={"retry-after": str(max(1, retry_after_s)), "x-weft-limit-scope": scope})


class Unavailable(ApiError):
    """The server is stopping: another one, or this one after its restart, takes the request."""

    status = 503
    code = "draining"
    every: Mapping[str, str] = {"retry-after": "1"}


class CannotStore(Unavailable):
    """Disk or database accept nothing for now; stored results can still be fetched, and the same request succeeds
    later."""

    code = "cannot_store"


def refuse(problems: Iterable[Problem], field: str | None = None) -> None:
    """Raise Invalid for the first of `problems`, if there is one. `field` is its place in the request."""
    for problem in problems:
        raise Invalid(f"{problem.where if field is None else field}: {problem.what}")


def explain(error: ValidationError | RequestValidationError, prefix: tuple[str, ...] = ()) -> str:
    """Pydantic's errors as one line: `field: what is wrong (got value)`."""
    if isinstance(error, ValidationError) and error.error_count() > MAX_EXPLAINED:  # each would become a dict
        return f"{error.error_count()} fields of the body are wrong, or unknown: it is not of the form asked for here"
    lines, found = [], error.errors()
    for item in found[:5]:
        field = ".".join(str(part) for part in item["loc"] if part not in prefix) or "body"
        got = item.get("input")
        shown = "" if isinstance(got, (dict, list, bytes)) or item["type"] == "missing" else f" (got {quote(got)})"
        told = item["msg"].removeprefix("Value error, ")  # pydantic's own words before those of a validator
        lines.append(f"{field}: {told}{shown}")
    more = found[5:]
    return "; ".join(lines) + (f"; and {len(more)} more" if more else "")


def field_of(error: ValidationError) -> str | None:
    """The first wrong field of a body, with the objects around it but without positions in lists."""
    found = error.errors()[0]["loc"] if error.error_count() <= MAX_EXPLAINED else ()
    return ".".join(takewhile(lambda part: isinstance(part, str), found)) or None  # type: ignore[arg-type]


def count(request: Request, error: ApiError) -> None:
    """Count a refusal: for polls that find nothing, and for the operator's monitoring."""
    service = getattr(request.app.state, "service", None)
    if service is None:
        return
    if isinstance(error, NotFound) and POLLS in request.scope:
        service.misses.note(request.scope[POLLS])
    elif isinstance(error, PaymentRequired):
        service.journal.meters.denied[error.scope] += 1
    elif isinstance(error, (Busy, OverQuota, RateLimited)):
        reason = error.reason if isinstance(error, RateLimited) else error.code
        service.journal.meters.rate_limited[reason] += 1


def form_of(error: ApiError) -> dict[str, Any]:
    """The error in OpenAI's form."""
    status = 400 if error.status == 422 else error.status  # for a bad body OpenAI's clients know no other status
    kind = _OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    param = getattr(error, "param", None)
    return {"error": {"message": error.detail, "type": kind, "param": param, "code": error.code}}


def away(error: Exception) -> CannotStore:
    """The error to answer with when one of `STORES` fails for a moment. Raises the failure itself if it is lasting."""
    if not isinstance(error, OSError):
        log.warning("the database does not answer: %s", logs.in_a_line(error), extra=logs.SELDOM)
    elif is_lasting(error):
        raise error
    else:
        log.error("the disk does not answer: %s", error, extra=logs.SELDOM)
    return CannotStore(f"{what_failed(error)}; send the request again")
