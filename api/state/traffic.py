"""Counts of this process's HTTP, for the operator's monitoring: by a route's template, never by path or tenant, so that
no client adds a series. And how late the event loop is, which is what all requests wait for."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from scheduler.journal.ending.meters import Histogram

#: Labels for a request of an unknown route, and for one whose client left before an answer began.
NO_ROUTE, NO_ANSWER = "none", "none"
#: Methods that are counted by name.
METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
#: How often the event loop's lag is measured.
LOOK_S = 0.25


@dataclass
class Traffic:
    in_flight: int = 0
    answered: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # by (route, method, status)
    seconds: defaultdict[tuple[str, str], Histogram] = field(
        default_factory=lambda: defaultdict(Histogram)
    )  # route, method
    received_bytes: Counter[str] = field(default_factory=Counter)  # by route
    sent_bytes: Counter[str] = field(default_factory=Counter)
    loop_lag: Histogram = field(default_factory=Histogram)

    def ended(self, route: str, method: str, status: str, seconds: float, received: int, sent: int) -> None:
        """A request was answered to its end, or its client has left."""
        known = method if method in METHODS else "other"
        self.answered[route, known, status] += 1
        self.seconds[route, known].observe(seconds)
        self.received_bytes[route] += received
        self.sent_bytes[route] += sent

    async def watch_loop(self) -> None:
        """Measure, until cancelled, how late the event loop wakes this task."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LOOK_S
            await asyncio.sleep(LOOK_S)
            self.loop_lag.observe(max(0.0, loop.time() - due))
