"""The time that a trainer has for what is in its hands, as the server sees it.

A trainer ends itself when a pass, or the uploaded loss of an operation, takes longer than it may
(`workers.trainer.watchdog`). The server remembers whose loss it was. A trainer that fails to end itself is cut off; the
embedded service then kills it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from scheduler.links.messages import InLoss

#: How much longer than its limit a trainer may take before it is cut off: it should have ended itself.
GRACE_S = 10.0
#: If a trainer dies after this share of a loss's limit, that loss is taken for the cause.
MOST_OF_IT = 0.5


class Overdue:
    """The deadline of one trainer. `cut_off` ends the link to it."""

    def __init__(self, cut_off: Callable[[], None]) -> None:
        self.loss: InLoss | None = None  # the uploaded loss being computed
        self._since = 0.0
        self._cut_off = cut_off
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def begin(self, limit_s: float) -> None:
        """A pass has begun that may take `limit_s`; 0: as long as it likes."""
        self._set("pass", limit_s)

    def told(self, loss: InLoss) -> None:
        self.loss = loss if loss.op_id else None
        self._since = asyncio.get_running_loop().time()
        self._set("loss", loss.limit_s)

    def end(self) -> None:
        """Note that the trainer has nothing to do."""
        self.loss = None
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    @property
    def overran(self) -> bool:
        """True if the loss being computed has used up its time."""
        took_s = asyncio.get_running_loop().time() - self._since
        return self.loss is not None and took_s >= MOST_OF_IT * self.loss.limit_s

    def _set(self, what: str, limit_s: float) -> None:
        if (timer := self._timers.pop(what, None)) is not None:
            timer.cancel()
        if limit_s:
            self._timers[what] = asyncio.get_running_loop().call_later(limit_s + GRACE_S, self._cut_off)
