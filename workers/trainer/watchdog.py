"""Ends this process when something takes longer than it may, whatever it is doing.

The timer is a thread of C that needs no interpreter: it prints where Python is and leaves, also while an operation of
torch or of Python holds everything else up. What the trainer held is rebuilt by its successor, and whose work it was
the server knows (`scheduler.links.messages.InLoss`).
"""

from __future__ import annotations

import faulthandler
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Watchdog:
    """Limits may stand in one another; the one that ends first counts."""

    def __init__(self) -> None:
        self._until = math.inf

    @contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        outer = self._until
        self._set(min(outer, time.monotonic() + seconds))
        try:
            yield
        finally:
            self._set(outer)

    def _set(self, until: float) -> None:
        self._until = until
        if until == math.inf:
            faulthandler.cancel_dump_traceback_later()
        else:
            faulthandler.dump_traceback_later(max(1e-3, until - time.monotonic()), exit=True)


@contextmanager
def no_limit(seconds: float) -> Iterator[None]:
    """For a trainer within a process that does other things too."""
    yield
