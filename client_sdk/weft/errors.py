"""One tree of errors for everything the client can raise.

Every error names what happened, the HTTP status and the server's own words if it spoke, and the request id if there is
one. Errors of status 408, 429 and 5xx reach the user only when retrying has gone on for the whole budget.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = [
    "APIConnectionError",
    "APIError",
    "APIResponseValidationError",
    "APIStatusError",
    "APITimeoutError",
    "AuthenticationError",
    "BadRequestError",
    "BillingError",
    "ConflictError",
    "GoneError",
    "GradientMissingError",
    "InternalServerError",
    "LaneBrokenError",
    "NoKeyError",
    "NotFoundError",
    "PermissionDeniedError",
    "RateLimitError",
    "RequestFailedError",
    "UnprocessableEntityError",
    "WeftError",
]


class WeftError(Exception):
    """Anything that went wrong in talking to a Weft server."""


class NoKeyError(WeftError):
    """No API key was given, or one that no header can hold."""


class APIError(WeftError):
    """A request that failed: no answer came, or an answer with an error."""


class APIConnectionError(APIError):
    """No answer: the server could not be reached, or the connection broke, for as long as we tried."""


class APITimeoutError(APIConnectionError):
    """No answer in time."""


class APIResponseValidationError(APIError):
    """An answer that is not what the protocol says."""


class APIStatusError(APIError):
    """An answer with an error status. `message` is the server's, `body` its JSON if it was JSON. `operation` is the id
    of the refused operation, if the server recorded it as failed."""

    def __init__(
        self,
        message: str,
        status_code: int,
        request_id: str | None = None,
        body: Any = None,
        operation: str | None = None,
    ) -> None:
        self.message = message
        self.status_code = status_code
        self.request_id = request_id
        self.body = body
        self.operation = operation
        super().__init__(f"{message} (status {status_code}{f', request {request_id}' if request_id else ''})")

    @property
    def foreign(self) -> bool:
        """True if a proxy or another server answered: Weft's own refusals carry an error code."""
        return not (isinstance(self.body, dict) and "code" in self.body)


class BadRequestError(APIStatusError):
    """400: the request makes no sense."""


class AuthenticationError(APIStatusError):
    """401: the API key is missing, wrong or revoked."""


class BillingError(APIStatusError):
    """402: the organisation is out of credit or over its budget."""


class PermissionDeniedError(APIStatusError):
    """403: the key may not do this."""


class NotFoundError(APIStatusError):
    """404: there is no such thing, or it belongs to somebody else."""


class ConflictError(APIStatusError):
    """409: the request clashes with something that is already there."""


class GoneError(APIStatusError):
    """410: what the request asks for was there, but is no longer."""


class UnprocessableEntityError(APIStatusError):
    """422: a field is wrong; the message names it."""


class RateLimitError(APIStatusError):
    """429: too much at once."""


class InternalServerError(APIStatusError):
    """5xx: the server failed."""


class RequestFailedError(WeftError):
    """An accepted operation has failed, for good. `category` says whose fault it is: "user", "server" or "unknown"."""

    def __init__(self, message: str, request_id: str, category: str) -> None:
        self.message = message
        self.request_id = request_id
        self.category = category
        super().__init__(f"{message} (category {category}, request {request_id})")


class LaneBrokenError(WeftError):
    """An earlier operation of this training run never reached the server, so later ones cannot be executed in order."""


class GradientMissingError(WeftError):
    """An `optim_step` that was not taken, because a `forward_backward` before it failed or was never sent: the step
    would have lacked that gradient. The next step is taken."""


#: An HTML tag.
_TAG = re.compile(r"<[^>]*>")

_BY_STATUS: dict[int, type[APIStatusError]] = {
    400: BadRequestError,
    401: AuthenticationError,
    402: BillingError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    410: GoneError,
    422: UnprocessableEntityError,
    429: RateLimitError,
}


def status_error(status: int, body: Any, request_id: str | None = None) -> APIStatusError:
    """The typed error of an answer with an error status; `body` is its JSON, or its text. The error's `request_id` is
    the one in the body (the operation's, if the error is about one), else `request_id`, which comes from the answer's
    header."""
    kind = _BY_STATUS.get(status) or (InternalServerError if status >= 500 else APIStatusError)
    named = body.get("request_id") if isinstance(body, dict) else None
    named = named if isinstance(named, str) else None
    message = _message_of(body) or f"the server answered with status {status}"
    return kind(message, status, named or request_id, body, named if named != request_id else None)


def _message_of(body: Any) -> str:
    """The server's words in any of the shapes in use: {"detail" | "error" | "message": ...} or plain text."""
    if isinstance(body, str):
        if body.lstrip().startswith("<"):  # an HTML page
            said = " ".join(_TAG.sub(" ", body).split())[:200]
            return f"a proxy in between, or another server, says: {said}" if said else ""
        return body.strip()[:500]
    if not isinstance(body, dict):
        return ""
    said = next((body[key] for key in ("detail", "error", "message") if body.get(key)), "")
    if isinstance(said, dict):
        return _message_of(said)
    if isinstance(said, list):
        return "; ".join(_validation_line(item) for item in said)
    return str(said)


def _validation_line(item: Any) -> str:
    if not isinstance(item, dict) or "msg" not in item:
        return str(item)
    return ".".join(str(part) for part in item.get("loc", ())) + f": {item['msg']}"
