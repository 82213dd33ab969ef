"""Polls for what is not there. Polls are not counted against rate limits, so that results arrive; but who asks for
ids that nobody has makes the database look for each, which no client does of itself. So these are counted, by key,
in a bucket as those of `api.state.rates`, and beyond it polls of that key are refused before they ask the database.

In memory of each process: what is spared is its own threads.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from api.errors import RateLimited
from api.state.rates import Buckets, Charge
from api.who.principal import Principal

#: Of one key in a minute.
MOST_PER_MINUTE = 600


class Misses:
    """Lives in the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._buckets = Buckets(clock)

    def check(self, who: Principal) -> None:
        """Raises RateLimited for whoever has missed too often."""
        if self._buckets.empty:
            return
        wait = self._buckets.wait_s(_miss(who))
        if wait > 0:
            raise RateLimited(
                f"more than {MOST_PER_MINUTE} polls of this key in a minute were for ids that are not there: retry in "
                f"{math.ceil(wait)} s, with ids that this server has given out",
                reason="unknown_ids",
                retry_after_s=math.ceil(wait),
                scope="key",
            )

    def note(self, who: Principal) -> None:
        """`who` has asked for something that is not there."""
        self._buckets.count(_miss(who))


def _miss(who: Principal) -> Charge:
    return Charge("key", who.urn, "unknown_ids", MOST_PER_MINUTE, 1)
