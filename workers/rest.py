"""Giving memory back while a worker has nothing to do.

`malloc` keeps much of the memory of a pass (docs/performance.md, "Memory of the workers"), which the next one then need
not ask the system for. While no user sends anything, other processes should have that memory.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

#: How long a worker has no work before it returns memory: longer than from one step of a loop to the next.
REST_S = 5.0


class Rest:
    """Is told of everything that a worker's loop does. After waiting for `REST_S`, memory is returned, once."""

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
    """Return free memory that glibc keeps to the system; other C libraries have no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
