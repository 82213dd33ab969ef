"""What requests looked up in the last seconds, so that a busy client costs no read for each request. Only what was
found is kept: nobody can fill it from outside with what is not there, and what is new works at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

#: How long changed facts are still used as they were: a revoked key, a role, a scope, a limit, a status.
REMEMBERED_S = 3.0
#: How many are kept at most, and from how many on outdated ones are dropped.
MOST, FIRST_LOOK = 10_000, 256


class Remembered(Generic[T]):
    """Remembered facts by name. Lives in the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[str, tuple[float, T]] = {}
        self._look_at = FIRST_LOOK

    def get(self, name: str) -> T | None:
        known = self._known.get(name)
        return known[1] if known is not None and self._clock() < known[0] else None

    def put(self, name: str, found: T) -> None:
        now = self._clock()
        if len(self._known) >= self._look_at:
            self._known = {known: kept for known, kept in self._known.items() if now < kept[0]}
            if len(self._known) >= MOST:
                self._known = {}
            self._look_at = min(MOST, max(FIRST_LOOK, 2 * len(self._known)))
        self._known[name] = (now + REMEMBERED_S, found)

    def clear(self) -> None:
        """Look everything up again."""
        self._known.clear()
