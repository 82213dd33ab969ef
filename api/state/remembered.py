"""What requests looked up in the last seconds, so that a busy client costs no read for each request. Only what was
found is kept: nobody can fill it from outside with what is not there, and what is new works at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

#: What has changed in the database is still used for this long as it was: a key that is revoked, a role, a scope, a
#: limit, a status.
REMEMBERED_S = 3.0
#: Kept at a time.
MOST = 10_000


class Remembered(Generic[T]):
    """By name. Lives in the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[str, tuple[float, T]] = {}

    def get(self, name: str) -> T | None:
        known = self._known.get(name)
        return known[1] if known is not None and self._clock() < known[0] else None

    def put(self, name: str, found: T) -> None:
        if len(self._known) >= MOST:
            self._known.clear()
        self._known[name] = (self._clock() + REMEMBERED_S, found)

    def clear(self) -> None:
        """Look everything up again."""
        self._known.clear()
