"""Reading request bodies: never more than the limit, off the event loop when they are large.

Routes read their body themselves, after authentication, because the framework would read and parse it before.
"""

from __future__ import annotations

from typing import TypeVar

import zstandard
from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool

from api.errors import Invalid, Malformed, TooLarge, Unreadable, explain
from api.state.service import service_of

M = TypeVar("M", bound=BaseModel)

#: Larger JSON bodies are parsed in a thread.
INLINE_BYTES = 32_768
#: Memory that one compressed body may make the decoder keep; every usual compression level stays below.
MAX_WINDOW_BYTES = 1 << 23


async def read_body(request: Request) -> bytes:
    """The body, decompressed. Raises TooLarge beyond the server's limit, of what was sent and of what it unpacks to."""
    limit = service_of(request).settings.limits.max_body_bytes
    raw = await _receive(request, limit)
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding == "identity":
        return raw
    if encoding == "zstd":
        return await run_in_threadpool(unpack_zstd, raw, limit)
    raise Unreadable(f"content-encoding {encoding!r} is not supported: send zstd or no content-encoding")


async def read_json(request: Request, model: type[M]) -> M:
    """The body as a `model`. Raises Malformed with the fields that are wrong."""
    body = await read_body(request)
    if len(body) <= INLINE_BYTES:
        return parse_json(body, model)
    return await run_in_threadpool(parse_json, body, model)


def parse_json(body: bytes, model: type[M]) -> M:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise Malformed(explain(error)) from None


def unpack_zstd(data: bytes, limit: int) -> bytes:
    """Unpack zstd, stopping as soon as it turns out larger than `limit` bytes."""
    try:
        declared = zstandard.frame_content_size(data)
        if declared > limit:
            raise _too_large(limit)
        window = max(MAX_WINDOW_BYTES, declared)
        with zstandard.ZstdDecompressor(max_window_size=window).stream_reader(data, read_across_frames=True) as reader:
            unpacked = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise Invalid(f"the body is not valid zstd: {error}") from None
    if len(unpacked) > limit:
        raise _too_large(limit)
    if len(unpacked) < declared:  # the reader is content with a frame that breaks off
        raise Invalid(f"the body is not valid zstd: it ends after {len(unpacked)} of {declared} bytes")
    return unpacked


async def _receive(request: Request, limit: int) -> bytes:
    """Collect the body. One that is too large is read on for another `limit` bytes and thrown away: a client that is
    cut off while it sends would see a broken connection and retry instead of reading why."""
    declared = request.headers.get("content-length", "0")
    too_large = not declared.isdecimal() or int(declared) > limit
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        too_large = too_large or size > limit
        if size > 2 * limit:
            break
        if too_large:
            parts.clear()
        else:
            parts.append(part)
    if too_large:
        raise _too_large(limit)
    return b"".join(parts)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body is larger than the limit of {limit} bytes: send fewer data in one request")
