"""Server-sent events: a stream of `data:` lines over one answer."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi.responses import StreamingResponse

#: Proxies in between hand on what they get at once.
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def event(data: bytes, name: str = "") -> bytes:
    """One event; `data` is one line."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + data + b"\n\n"


def event_stream(events: AsyncIterator[bytes]) -> StreamingResponse:
    return StreamingResponse(events, media_type="text/event-stream", headers=_HEADERS)
