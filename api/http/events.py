"""Server-sent events: a stream of `data:` lines over one answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

#: Headers that make proxies pass events on at once.
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def event(data: bytes, name: str = "") -> bytes:
    """One event; `data` is one line."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + data + b"\n\n"


class EventStream(StreamingResponse):
    """An event stream that closes its generator at its end: a client that leaves is noticed at once, wherever the
    generator then stands."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=_HEADERS)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)
