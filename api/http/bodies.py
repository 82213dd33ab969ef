"""Reading request bodies: never more than the limit, off the event loop when they are large.

Routes read their body themselves, after authentication, because the framework would read and parse it before. How much
they take is the class that they declare (`api.http.body_sizes`).
"""

from __future__ import annotations

import time
from functools import cache, partial
from typing import TypeVar

import zstandard
from fastapi import Request
from google.protobuf.message import Message
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from weft.wire.base import Request as WireRequest
from weft.wire.binary.message import read_message
from weft.wire.error import WireError

from api.errors import Invalid, Malformed, TooLarge, Unreadable, explain, field_of
from api.http.body_sizes import GUARD_KEY, ROOM_KEY, SCOPE_KEY, SIZES, BodySize, SizeClass
from api.http.headers import header
from api.http.structure import MAX_VALUES, check_json, check_protobuf
from api.state.arriving import Arrival
from api.state.remembered import REMEMBERED_S
from api.state.service import Service, service_of

M = TypeVar("M", bound=BaseModel)
P = TypeVar("P", bound=Message)

#: Larger bodies are parsed in a thread.
INLINE_BYTES = 16_384
#: Larger protobuf bodies are parsed in a thread. One of this size takes 0.2 ms at most, whatever it contains; handing
#: it to a thread takes 0.1 ms.
INLINE_PROTOBUF_BYTES = 32_768
#: A compressed body may unpack to this many times its size, and in any case to the floor. Tokens and numbers shrink to
#: a third, constant weights more.
MAX_RATIO = 100
RATIO_FLOOR_BYTES = 1 << 20
#: How many bytes are unpacked at a time.
_PIECE = 1 << 18
#: How many bytes are kept as the beginning of a body that is too large.
_BEGINS = 256
#: Memory that one compressed body may make the decoder keep; every usual compression level stays below.
MAX_WINDOW_BYTES = 1 << 23


def size_of(request: Request) -> BodySize:
    """The body size that the route has declared, within the server's limit."""
    declared: SizeClass = request.scope.get(SCOPE_KEY, "small")
    most = service_of(request).settings.limits.max_body_bytes
    return _within(declared, most)


@cache
def _within(declared: SizeClass, most: int) -> BodySize:
    size = SIZES[declared]
    return BodySize(min(most, size.max_bytes or most), size.packed)


def may_come_to(request: Request) -> int:
    """The most bytes that the body can have once unpacked, by its headers; 0 for one that is too large, since nothing
    of it is kept."""
    most = size_of(request).max_bytes or 0
    declared = request.headers.get("content-length", "")
    if not declared.isdecimal():
        return most
    size_bytes = int(declared)
    if size_bytes > most:
        return 0
    return size_bytes if "content-encoding" not in request.headers else min(most, unpacks_to_at_most(size_bytes))


def unpacks_to_at_most(size_bytes: int) -> int:
    return max(RATIO_FLOOR_BYTES, MAX_RATIO * size_bytes)


async def read_body(request: Request) -> bytes:
    """The body, decompressed. Raises TooLarge if it exceeds the route's limit, as sent or unpacked; and the guard's
    error if the key was revoked while the body came."""
    with service_of(request).arriving_body() as arrival:
        return await _read(request, arrival)


async def _read(request: Request, arrival: Arrival) -> bytes:
    size = size_of(request)
    limit = size.max_bytes or 0
    encoding = (header(request.scope, b"content-encoding") or "identity").lower()
    if encoding not in ("identity", "zstd") or (encoding == "zstd" and not size.packed):
        taken = "zstd or no content-encoding" if size.packed else "no content-encoding"
        raise Unreadable(f"content-encoding {encoding!r} is not supported here: send {taken}")
    began = time.monotonic()
    raw = await _receive(request, limit, arrival)
    if time.monotonic() - began > REMEMBERED_S and GUARD_KEY in request.scope:
        await request.scope[GUARD_KEY].look_again(request)
    if ROOM_KEY in request.scope:
        await request.scope[ROOM_KEY].work()
    if encoding == "identity":
        return raw
    return await service_of(request).work(len(raw), partial(unpack_zstd, raw, limit))


async def read_json(request: Request, model: type[M], *, most_values: int = MAX_VALUES) -> M:
    """The body as a `model`. Raises Malformed, naming the wrong fields."""
    service = service_of(request)
    with service.arriving_body() as arrival:
        return await parse(service, await _read(request, arrival), model, most_values)


async def parse(service: Service, body: bytes, model: type[M], most_values: int = MAX_VALUES) -> M:
    """`parse_json`, in a thread if the body is large."""
    if len(body) <= INLINE_BYTES:
        return parse_json(body, model, most_values)
    return await service.work(len(body), partial(parse_json, body, model, most_values))


def parse_json(body: bytes, model: type[M], most_values: int = MAX_VALUES) -> M:
    """Parse JSON as a `model`; in the event loop only up to INLINE_BYTES. In the protocol's own bodies nothing is taken
    for a value of another type ("5" or true for a number). Raises TooLarge beyond `most_values` in lists."""
    check_json(body, most_values)
    try:
        return model.model_validate_json(body, strict=issubclass(model, WireRequest) or None)
    except ValidationError as error:
        wrong, field = explain(error), field_of(error)
    # raised outside of the handler, so that it does not keep the large ValidationError alive
    raise Malformed(wrong, field)


def parse_protobuf(body: bytes, form: type[P]) -> P:
    """Parse protobuf; in the event loop only up to INLINE_PROTOBUF_BYTES."""
    try:
        check_protobuf(body, form)
    except TooLarge as error:
        error.begins = body[:_BEGINS]
        raise
    try:
        return read_message(body, form)
    except WireError as error:
        raise Invalid(f"the body is {error}") from None


def unpack_zstd(data: bytes, limit: int) -> bytes:
    """Unpack zstd; stops as soon as the result is larger than `limit` bytes, or than the allowed ratio."""
    allowed = min(limit, unpacks_to_at_most(len(data)))
    try:
        declared = zstandard.frame_content_size(data)
        if declared > allowed:
            raise _unpacks_to_too_much(data, limit)
        window = max(MAX_WINDOW_BYTES, declared)
        pieces: list[bytes] = []
        size = 0
        with zstandard.ZstdDecompressor(max_window_size=window).stream_reader(data, read_across_frames=True) as reader:
            while piece := reader.read(_PIECE):
                size += len(piece)
                if size > allowed:
                    raise _unpacks_to_too_much(data, limit)
                pieces.append(piece)
    except zstandard.ZstdError as error:
        raise Invalid(f"the body is not valid zstd: {error}") from None
    if size < declared:  # the reader accepts a truncated frame
        raise Invalid(f"the body is not valid zstd: it ends after {size} of {declared} bytes")
    return b"".join(pieces)


async def _receive(request: Request, limit: int, arrival: Arrival) -> bytes:
    """Receive the body. One that is too large is still read for another `limit` bytes, which are thrown away: a client
    that is cut off while it sends would see a broken connection, and retry instead of reading the error."""
    declared = header(request.scope, b"content-length") or "0"
    too_large = not declared.isdecimal() or int(declared) > limit
    if too_large and (header(request.scope, b"expect") or "").lower() == "100-continue":
        raise _too_large(limit)  # this client sends the body only when told to
    parts: list[bytes] = []
    begins, size, more = b"", 0, True
    while more:  # not `Request.stream`: its generator costs the event loop extra work for each body
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part, more = message.get("body", b""), message.get("more_body", False)
        size += len(part)
        begins += part[: _BEGINS - len(begins)]
        too_large = too_large or size > limit
        if size > 2 * limit:
            break
        if too_large:
            parts.clear()
            arrival.drop()
        else:
            parts.append(part)
            if part and (more or size > INLINE_BYTES):
                arrival.came(len(part))
    arrival.whole()
    if too_large:
        raise _too_large(limit, begins)
    return b"".join(parts)


def _too_large(limit: int, begins: bytes = b"") -> TooLarge:
    return TooLarge(f"the body is larger than the limit of {limit} bytes: send fewer data in one request", begins)


def _unpacks_to_too_much(data: bytes, limit: int) -> TooLarge:
    allowed = unpacks_to_at_most(len(data))
    if limit <= allowed:
        return _too_large(limit)
    return TooLarge(
        f"the body of {len(data)} bytes unpacks to more than {allowed}: a compressed body may come to {MAX_RATIO} "
        f"times its size, or to {RATIO_FLOOR_BYTES} bytes; send it uncompressed"
    )
