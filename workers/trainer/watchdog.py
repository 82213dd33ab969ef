"""Ends this process when something takes longer than it may, whatever it is doing.

The timer is the kernel's and needs no interpreter: its signal prints where the main thread is and ends the process,
also while an operation of torch or of Python holds everything else up. (A second thread that prints the stack of a
running one, as `faulthandler.dump_traceback_later` does, reads frames that change under it and can crash.) What the
trainer held is rebuilt by its successor, and whose work it was the server knows (`scheduler.links.messages.InLoss`).
"""

from __future__ import annotations

import faulthandler
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

#: Limits the work in a block to that many seconds.
Limit = Callable[[float], AbstractContextManager[None]]


class Watchdog:
    """Ends the process when a block exceeds its limit. Limits may be nested; the one that ends first counts."""

    def __init__(self) -> None:
        self._until = math.inf
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.register(signal.SIGALRM, all_threads=False, chain=True)

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
        signal.setitimer(signal.ITIMER_REAL, 0 if until == math.inf else max(1e-3, until - time.monotonic()))


@contextmanager
def no_limit(seconds: float) -> Iterator[None]:
    """A limit that does nothing, for a trainer in a process that does other things, too."""
    yield
