"""How many groups to keep under way, found while running: more while the server keeps up, fewer when a queue builds.

Additive-multiplicative as prime-rl does it: events in, a limit out; the caller decides when to look. It bounds what
the schedule would allow, and never allows more.
"""

from __future__ import annotations

from weft.rl import checks

#: The limit grows by a quarter when what is allowed is nearly used and next to nothing waits.
GROW, USED, FREE = 1.25, 0.9, 0.1
#: A queue longer than half of what runs, seen this often in a row, is an overload.
QUEUE, LOOKS = 0.5, 3
#: An overload takes a tenth; one that follows at once, or a refusal (429), halves.
SHRINK, HALVE = 0.9, 0.5


class Concurrency:
    """A limit between `least` and `most`, moved by `observe` and `refused`."""

    def __init__(self, start: int = 8, least: int = 1, most: int = 1024) -> None:
        for name, value in (("start", start), ("least", least), ("most", most)):
            checks.count(name, value)
        if not 1 <= least <= start <= most:
            raise ValueError(f"need 1 <= least <= start <= most, got {least}, {start}, {most}")
        self.least, self.most = least, most
        self._limit = float(start)
        self._overloads = 0
        self._just_cut = False

    @property
    def limit(self) -> int:
        return int(self._limit)

    def observe(self, in_flight: int, running: float, waiting: float) -> None:
        """`in_flight` groups of ours; of the server's sequences so many run and so many wait for a place. Only the
        ratio counts, so shares of their time say the same (Little's law)."""
        if waiting > QUEUE * running:
            self._overloads += 1
            if self._overloads >= LOOKS:
                self._move(HALVE if self._just_cut else SHRINK)
                self._overloads, self._just_cut = 0, True
            return
        self._overloads, self._just_cut = 0, False
        if waiting <= FREE * running and in_flight >= USED * self.limit:
            self._limit = min(float(self.most), max(self._limit * GROW, self._limit + 1))

    def refused(self) -> None:
        """Halve the limit: the server said that there are too many requests."""
        self._move(HALVE)

    def _move(self, factor: float) -> None:
        self._limit = max(float(self.least), self._limit * factor)
