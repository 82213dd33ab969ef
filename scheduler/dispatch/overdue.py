"""The time that a trainer has for what is in its hands, as the server sees it.

A trainer ends itself when a pass, or the uploaded loss of an operation, takes longer than it may
(`workers.trainer.watchdog`). Here it is known whose loss that was; and a trainer that cannot even end itself is cut
off, which for the embedded service means killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from scheduler.links.messages import InLoss

#: What a trainer that should have ended itself is given beyond its limit.
GRACE_S = 10.0
#: A loss over which a trainer died after so much of its limit was the reason.
MOST_OF_IT = 0.5


class Overdue:
    """`cut_off` ends the link to the trainer."""

    def __init__(self, cut_off: Callable[[], None]) -> None:
        self.loss: InLoss | None = None  # which is being computed
        self._since = 0.0
        self._cut_off = cut_off
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def begin(self, limit_s: float) -> None:
        """A pass has begun; 0: it may take for ever."""
        self._set("pass", limit_s)

    def told(self, loss: InLoss) -> None:
        self.loss = loss if loss.op_id else None
        self._since = asyncio.get_running_loop().time()
        self._set("loss", loss.limit_s)

    def end(self) -> None:
        """Nothing is in the trainer's hands."""
        self.loss = None
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    @property
    def overran(self) -> bool:
        """Whether the loss that is being computed has had its time."""
        took_s = asyncio.get_running_loop().time() - self._since
        return self.loss is not None and took_s >= MOST_OF_IT * self.loss.limit_s

    def _set(self, what: str, limit_s: float) -> None:
        if (timer := self._timers.pop(what, None)) is not None:
            timer.cancel()
        if limit_s:
            self._timers[what] = asyncio.get_running_loop().call_later(limit_s + GRACE_S, self._cut_off)
