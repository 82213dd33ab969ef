"""What a worker that has nothing to do gives back.

`malloc` keeps much of what a pass has taken for the next one (docs/performance.md, "Memory of the workers"), which that
one then need not ask the system for. Between users who think, it is others' memory.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

#: So long without work, before memory goes back: longer than from one step of a loop to the next.
REST_S = 5.0


class Rest:
    """Told of all that a worker's loop does; after `REST_S` of waiting memory is given back, once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.worked()

    def worked(self) -> None:
        self._worked_at, self._resting = self._clock(), False

    def waited(self) -> None:
        if not self._resting and self._clock() - self._worked_at >= REST_S:
            self._resting = True
            give_back()


def give_back() -> None:
    """Free memory that glibc keeps goes back to the system; other C libraries have no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
