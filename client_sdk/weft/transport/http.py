"""HTTP to one server: its address, pooled connections, retries by policy, typed errors. Runs on the background loop.

Two pools, because long polls hold their connections for up to half a minute and must not starve submissions.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from weft.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    NoKeyError,
    WeftError,
    status_error,
)
from weft.transport.contact import Contact
from weft.transport.pool import Pool
from weft.transport.retry import Attempts, RetryPolicy
from weft.transport.tokens import Tokens, identity_of
from weft.version import __version__
from weft.wire.service import AuthTokenResponse
from weft.wire.sessions import WhoamiResponse

log = logging.getLogger("weft")

API = "/api/v1"
PROTOBUF = "application/x-protobuf"
MAX_CALLS, MAX_POLLS = 64, 512
#: How long a request waits for a server that answers but cannot serve before the reason is logged, once for each
#: request.
TOLD_AFTER_S = 5.0
#: Missing credit holds up all requests: one log line in this many seconds is enough.
UNPAID_TOLD_S = 60.0

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Endpoint:
    """A server's address, without a trailing slash, and an API key for it."""

    base_url: str
    api_key: str = field(repr=False)


def resolve_endpoint(base_url: str | None = None, api_key: str | None = None) -> Endpoint:
    """Fill in what is not given from WEFT_BASE_URL / WEFT_API_KEY, else TINKER_BASE_URL / TINKER_API_KEY."""
    url = base_url or os.environ.get("WEFT_BASE_URL") or os.environ.get("TINKER_BASE_URL")
    key = api_key or os.environ.get("WEFT_API_KEY") or os.environ.get("TINKER_API_KEY")
    if not url:
        raise WeftError("no server address: set WEFT_BASE_URL or pass base_url")
    if not url.startswith(("http://", "https://")):
        raise WeftError(f"the server address {url!r} must start with http:// or https://")
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise WeftError(f"the server address {url[:200]!r} cannot be used: {error}; write http://HOST:PORT") from None
    if not address.host or not 0 < (address.port or 80) <= 65535:
        raise WeftError(f"the server address {url[:200]!r} needs a host, and a port of 1 to 65535: http://HOST:PORT")
    if not key:
        raise NoKeyError("no API key: set WEFT_API_KEY or pass api_key (`weftd key create` makes one)")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise NoKeyError("the API key has characters that no key has: give WEFT_API_KEY or api_key as it was printed")
    return Endpoint(url.rstrip("/"), key)


@dataclass(frozen=True)
class Call:
    """One request, as it will be sent each time. `body` is already encoded; None sends none."""

    method: str
    path: str
    body: bytes | None = None
    content_type: str = "application/json"
    params: Mapping[str, Any] | None = None
    headers: Mapping[str, str] | None = None
    timeout_s: float = 60.0
    #: Wait out a 429 without end: operations and samples are held back while the server's queue is full.
    patient: bool = False
    #: Long polls use a connection pool of their own.
    poll: bool = False
    #: True: a redirect is a good answer, whose target is fetched without our credential. False: a redirect is an error,
    #: since the credential is sent to nobody but the server.
    redirected: bool = False
    #: Sent with the API key itself even where tokens are in use.
    with_key: bool = False


class Transport:
    """All requests of one client."""

    def __init__(self, endpoint: Endpoint, policy: RetryPolicy, headers: Mapping[str, str] | None = None) -> None:
        self.endpoint = endpoint
        self.policy = policy
        self.headers = dict(headers or {})
        self.poll_policy = replace(policy, budget_s=policy.outage_budget_s)
        #: True if the server wants tokens in place of the API key, as the session's configuration says.
        self.use_tokens = False
        self._tokens = Tokens(self._exchange)
        shared = {
            "X-API-Key": endpoint.api_key,
            "User-Agent": f"weft-python/{__version__}",
            "x-sdk-version": __version__,
            **self.headers,
        }
        self._process = os.getpid()
        self._unpaid_told_s = -math.inf
        self._contact = Contact(endpoint.base_url)
        self._calls = Pool(shared, MAX_CALLS)
        self._polls = Pool(shared, MAX_POLLS)

    async def close_idle(self) -> None:
        """Close the connections that no request is using. Later requests open new ones."""
        await self._calls.close_idle()
        await self._polls.close_idle()

    async def close(self) -> None:
        """Close all connections."""
        await self._calls.close()
        await self._polls.close()

    async def once(self, call: Call) -> httpx.Response:
        """Send once, whatever the answer. `APITimeoutError` or `APIConnectionError` if there is none."""
        if not self.use_tokens or call.with_key:
            return await self._once(call, {})
        token = await self._tokens.current()
        response = await self._once(call, {"X-API-Key": token})
        if not _refuses_token(response):
            return response
        return await self._once(call, {"X-API-Key": await self._tokens.replace(token)})

    async def _exchange(self) -> str:
        """Exchange the key for a token."""
        return (await self.ask("POST", "/auth/token", AuthTokenResponse, b"{}", with_key=True)).jwt

    async def identity(self) -> WhoamiResponse:
        """Whose credential this is: the claims of the token that the key is exchanged for, or of the key if it is
        itself a token."""
        key = self.endpoint.api_key
        return identity_of(key if key.startswith("eyJ") else await self._tokens.current())

    def check_process(self) -> None:
        """Raise in a fork: it has copies of our connections and counters, so two processes would read from one
        connection and use the same numbers."""
        if self._process != os.getpid():
            raise WeftError(
                f"this client was made in process {self._process}, of which this one is a fork: make another here; a "
                "sampler is handed over by get_sampler_handle(), or pickled"
            )

    async def _once(self, call: Call, credential: Mapping[str, str]) -> httpx.Response:
        self.check_process()
        headers = {"Accept": "application/json", **credential, **(call.headers or {})}
        if call.body is not None:
            headers["Content-Type"] = call.content_type
        pool = self._polls if call.poll else self._calls
        url = self.endpoint.base_url + API + call.path
        timeout = httpx.Timeout(call.timeout_s, connect=5.0, pool=None)
        try:
            response = await pool.request(
                call.method,
                url,
                content=call.body,
                params=call.params,
                headers=headers,
                timeout=timeout,
            )
            self._contact.there()
            return response
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise self._contact.missing(error) from error
        except httpx.TimeoutException as error:
            raise APITimeoutError(f"{call.method} {url}: no answer within {call.timeout_s:g} s") from error
        except httpx.InvalidURL as error:
            raise ValueError(
                f"{call.method} {call.path[:80]!r}: {error}; give a name or path of the server's"
            ) from error
        except (httpx.RequestError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise APIConnectionError(f"{call.method} {url}: {reason}") from error

    async def events(self, path: str, body: bytes) -> AsyncIterator[tuple[str, str]]:
        """Server-sent events, as (name, data), until the server ends them. The request is sent once, and again only if
        the server wants another token. Raises the typed error if it is refused or breaks off."""
        self.check_process()
        headers = {"Accept": "text/event-stream", "Content-Type": "application/json"}
        if self.use_tokens:
            headers["X-API-Key"] = await self._tokens.current()
        async for event in self._events(path, body, headers, again=self.use_tokens):
            yield event

    async def _events(
        self, path: str, body: bytes, headers: dict[str, str], again: bool
    ) -> AsyncIterator[tuple[str, str]]:
        url, timeout = self.endpoint.base_url + API + path, httpx.Timeout(None, connect=5.0)
        try:
            async with self._polls.stream("POST", url, content=body, headers=headers, timeout=timeout) as response:
                if again and _refuses_token(response):
                    headers["X-API-Key"] = await self._tokens.replace(headers["X-API-Key"])
                    async for event in self._events(path, body, headers, again=False):
                        yield event
                    return
                if not response.is_success:
                    await response.aread()
                    raise error_of(response)
                name = ""
                async for line in response.aiter_lines():
                    field, _, value = line.partition(": ")
                    if field == "data":
                        yield name, value
                    name = value if field == "event" else name if line else ""
        except (httpx.RequestError, OSError) as error:
            raise APIConnectionError(f"POST {url}: {error or type(error).__name__}") from error

    async def send(
        self, call: Call, policy: RetryPolicy | None = None, wanted: Callable[[], bool] = lambda: True
    ) -> httpx.Response:
        """Send until there is a good answer, a final refusal, no budget left, or nobody who waits. Every attempt sends
        the same bytes."""
        key = {"X-Idempotency-Key": str(uuid.uuid4())} if call.method != "GET" else {}
        call = replace(call, headers={**key, **(call.headers or {})})
        began = time.monotonic()
        attempts, told = Attempts(policy or self.policy, began, call.patient), False
        while True:
            answer, retry_after_s = await self._attempt(call)
            if isinstance(answer, httpx.Response):
                return answer
            status = status_of(answer, restarts=call.patient)
            pause_s = attempts.pause_after(status, time.monotonic(), retry_after_s)
            if pause_s is None or (status is None and self._contact.hopeless(pause_s)):
                raise answer
            answered = isinstance(answer, APIStatusError) and (status is None or status >= 500)
            failing = answered and time.monotonic() - began > TOLD_AFTER_S
            unpaid = status == 402 and time.monotonic() - self._unpaid_told_s >= UNPAID_TOLD_S
            if unpaid:
                self._unpaid_told_s = time.monotonic()
            loud = unpaid or (failing and not told)
            told = told or failing
            log.log(logging.WARNING if loud else logging.DEBUG, "again in %.1f s: %s", pause_s, answer)
            await asyncio.sleep(pause_s)
            if not wanted():
                raise answer

    async def _attempt(self, call: Call) -> tuple[httpx.Response | APIStatusError | APIConnectionError, float | None]:
        """One attempt: a good response, or the error and the pause that the server asks for."""
        try:
            response = await self.once(call)
        except APIConnectionError as error:
            return error, None
        if response.is_success or (response.has_redirect_location and call.redirected):
            return response, None
        return error_of(response), _retry_after_s(response)

    async def ask(
        self,
        method: str,
        path: str,
        answer: type[M],
        body: bytes | None = None,
        params: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> M:
        """Send a JSON request and read its answer as `answer`."""
        call = Call(method, path, body, params=params, **options)
        return parse(await self.send(call), answer)

    async def post_once(self, path: str, body: bytes) -> None:
        """Send without retries; the typed error if the answer is not good."""
        response = await self.once(Call("POST", path, body, timeout_s=10.0))
        if not response.is_success:
            raise error_of(response)


def status_of(failure: APIStatusError | APIConnectionError, *, restarts: bool) -> int | None:
    """The status of an answer, None if there was none. With `restarts`, also None for the answers of a router whose
    server restarts: some routers answer 404 or a page with status 200 then."""
    if not isinstance(failure, APIStatusError) or (restarts and failure.foreign and failure.status_code in (200, 404)):
        return None
    return failure.status_code


def is_page(response: httpx.Response) -> bool:
    """True if the answer is an HTML page, and so not Weft's."""
    return str(response.headers.get("content-type", "")).startswith("text/html")


def _refuses_token(response: httpx.Response) -> bool:
    """True if the server refuses the token, and wants another."""
    return response.status_code == 401 and 'error="invalid_token"' in response.headers.get("WWW-Authenticate", "")


def encode(body: Mapping[str, Any]) -> bytes:
    """JSON as bytes. Raises ValueError for values that JSON lacks: NaN, infinity, half of a surrogate pair."""
    return json.dumps(body, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()


def error_of(response: httpx.Response) -> APIStatusError:
    """The typed error of an answer that is not a success."""
    if response.has_redirect_location:
        there = response.headers["location"]
        return status_error(
            response.status_code,
            f"{response.request.url} is redirected to {there}, where no API key is sent: give the server's own address "
            "(base_url, else WEFT_BASE_URL)",
        )
    try:
        body: Any = response.json()
    except ValueError:
        body = response.text
    return status_error(response.status_code, body, response.headers.get("x-request-id"))


def parse(response: httpx.Response, answer: type[M]) -> M:
    """The answer's JSON as a model; `APIResponseValidationError` if it is not one."""
    try:
        return answer.model_validate_json(response.content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise APIResponseValidationError(
            f"{response.request.url.path}: unexpected answer, {where or 'body'}: {first['msg']}; it begins with "
            f"{response.text[:60]!r}"
        ) from error


def _retry_after_s(response: httpx.Response) -> float | None:
    """The server's wish in seconds, from `retry-after-ms` or `retry-after`."""
    for header, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        value = response.headers.get(header)
        try:
            if value is not None:
                return float(value) * scale
        except ValueError:
            continue
    return None
