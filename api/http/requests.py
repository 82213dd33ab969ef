"""What every request gets before anything else: an id, which its answer, its log lines and its operation carry; its
place in the metrics; and its span, where traces are on.

The id is the client's X-Request-ID where that is well-formed. It is for finding things and grants nothing.
"""

from __future__ import annotations

import logging
import re
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.state.addresses import is_address
from api.state.traffic import NO_ANSWER, NO_ROUTE, Traffic
from store import logs, tracing
from store.database.caller import SERVER, Caller, become
from store.people.secret import new_id

log = logging.getLogger(__name__)

HEADER = b"x-request-id"
#: Where proxies name their client. Who comes from a proxy's own address can write anything into it.
FORWARDED = b"x-forwarded-for"
#: A client's own request id, if it is accepted.
_WELL_FORMED = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class Requests:
    def __init__(self, app: ASGIApp, traffic: Traffic) -> None:
        self.app, self.traffic = app, traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, client = dict(scope["headers"]), scope.get("client")
        if client and FORWARDED in headers and not is_address(client[0]):
            client, scope = None, {**scope, "client": None}
        # until it is known who asks; without an address not None, which would be the server itself
        become(Caller(None, SERVER.actor, client[0] if client else ""))
        request_id = request_id_of(headers)
        method = scope["method"]
        if method == "HEAD":  # answered like a GET, but without the body
            scope = {**scope, "method": "GET"}
        began, received, sent, status, headed = time.monotonic(), 0, 0, NO_ANSWER, False

        async def read() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        async def answer(message: Message) -> None:
            nonlocal headed, sent, status
            if message["type"] == "http.response.start":
                status = str(message["status"])
                message["headers"] = [*message.get("headers", ()), (HEADER, request_id.encode())]
            elif method == "HEAD":
                if headed:
                    return
                headed, message = True, {"type": "http.response.body"}
            sent += len(message.get("body", b""))
            await send(message)

        self.traffic.in_flight += 1
        with logs.on(request=request_id), tracing.request(method, headers) as span:
            try:
                await self.app(scope, read, answer)
            finally:
                self.traffic.in_flight -= 1
                seconds, route = time.monotonic() - began, getattr(scope.get("route"), "path", NO_ROUTE)
                self.traffic.ended(route, method, status, seconds, received, sent)
                tracing.answered(span, method, route, status, logs.about())
                log.debug("%s %s: %s in %.4f s", method, route, status, seconds)


def request_id_of(headers: dict[bytes, bytes]) -> str:
    """The client's own request id, or a new one."""
    given = headers.get(HEADER, b"")
    return given.decode() if _WELL_FORMED.fullmatch(given) else new_id()
