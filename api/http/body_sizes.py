"""How large the body of a route may be. Every route is of one class, which it names where it declares who may call it
(`api.http.access.declare`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SizeClass = Literal["small", "medium", "data", "event"]

KIB = 1024


@dataclass(frozen=True)
class BodySize:
    #: Of what is sent, and of what it unpacks to. The server's `max_body_bytes` holds as well.
    max_bytes: int | None
    #: Whether it may come compressed.
    packed: bool = True


SIZES: dict[SizeClass, BodySize] = {
    "small": BodySize(64 * KIB),  # names, numbers, settings
    "medium": BodySize(1024 * KIB),  # lists: points of curves, events, ids, the graph of a loss
    "data": BodySize(None),  # prompts and training data
    "event": BodySize(256 * KIB, packed=False),  # from anybody, judged by a signature over its bytes
}

#: Where a route's guard leaves its class for `api.http.bodies`, in the request's scope.
SCOPE_KEY = "weft.body_size"
#: And itself, where it has let a key in.
GUARD_KEY = "weft.guard"
#: And the `Room` of a large body.
ROOM_KEY = "weft.room"
