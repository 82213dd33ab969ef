"""How large the body of a route may be. Every route is of one class, which it names where it declares who may call it
(`api.http.access.declare`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SizeClass = Literal["small", "medium", "data", "event"]

KIB = 1024


@dataclass(frozen=True)
class BodySize:
    #: The largest body, as sent and as unpacked (None: only the server's limit). The server's `max_body_bytes` holds as
    #: well.
    max_bytes: int | None
    #: Whether the body may be compressed.
    packed: bool = True


SIZES: dict[SizeClass, BodySize] = {
    "small": BodySize(64 * KIB),  # names, numbers, settings
    "medium": BodySize(1024 * KIB),  # lists: points of curves, events, ids, the graph of a loss
    "data": BodySize(None),  # prompts and training data
    "event": BodySize(256 * KIB, packed=False),  # from anybody; trusted by a signature over its bytes
}

#: The key in a request's scope under which the route's guard leaves the size class for `api.http.bodies`.
SCOPE_KEY = "weft.body_size"
#: The key under which the guard leaves itself, once it has accepted the request's API key.
GUARD_KEY = "weft.guard"
#: The key under which the guard leaves the `RequestRoom` of a large body.
ROOM_KEY = "weft.room"
