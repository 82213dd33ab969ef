"""Whether a server of the caller's version (`messages.FORM`) leads on this Redis. A worker of another version gets no
work, and must log why."""

from __future__ import annotations

import logging
import math
import time

from scheduler.links.messages import FORM

log = logging.getLogger(__name__)

TRAINERS = f"{{weft:trainers:{FORM}}}:"
LEADER = f"{TRAINERS}leader"
#: A worker that has found no leader for this long logs it.
LATE_S = 30.0
NO_LEADER = (
    f"no server has led in {LATE_S:.0f} s on this Redis. Where there are servers, they are of another version: start "
    "servers and workers of one (docs/operating.md)"
)


class Looked:
    """Logs what a worker finds each time that it looks for the leader."""

    def __init__(self) -> None:
        self._late_at = time.monotonic() + LATE_S
        self._away = False

    def unreachable(self, error: Exception) -> None:
        """Log, once, that Redis cannot be reached."""
        if not self._away:
            log.warning("%s; trying again", error)
        self._away = True

    def found(self, leads: bool) -> None:
        """Note whether a server leads; log, once, if none has for long."""
        now, self._away = time.monotonic(), False
        if leads:
            self._late_at = now + LATE_S
        elif now > self._late_at:
            self._late_at = math.inf
            log.warning("%s", NO_LEADER)
