"""Whether a server leads on this Redis, of the version of who asks (`messages.FORM`). Workers of another version get
nothing: they say so."""

from __future__ import annotations

import logging
import math
import time

from scheduler.links.messages import FORM

log = logging.getLogger(__name__)

TRAINERS = f"{{weft:trainers:{FORM}}}:"
LEADER = f"{TRAINERS}leader"
#: A worker that has not found a leader for so long says so.
LATE_S = 30.0
NO_LEADER = (
    f"no server has led in {LATE_S:.0f} s on this Redis. Where there are servers, they are of another version: start "
    "servers and workers of one (docs/operating.md)"
)


class Looked:
    """What a worker has found, look by look."""

    def __init__(self) -> None:
        self._late_at = time.monotonic() + LATE_S
        self._away = False

    def unreachable(self, error: Exception) -> None:
        """Says it once, until there is something to look at again."""
        if not self._away:
            log.warning("%s; trying again", error)
        self._away = True

    def found(self, leads: bool) -> None:
        """Says it once where nobody has led for long."""
        now, self._away = time.monotonic(), False
        if leads:
            self._late_at = now + LATE_S
        elif now > self._late_at:
            self._late_at = math.inf
            log.warning("%s", NO_LEADER)
