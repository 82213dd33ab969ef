"""What has completed of each sampler's requests, on a replica that hears of it from all (`scheduler.links.broadcasts`).

Cursors are the stamps of the news, so a client may ask any replica. What the database says about the time before a
target was followed gets stamps that were reserved before it was read: whatever ends later has a later one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from scheduler.journal.completions import Completion, Feeds, Target
from scheduler.links.contract import QueueUnreachable

#: Stamps for what one look into the database may find.
BLOCK = 10_000


class SharedCompletions:
    def __init__(self, reserve: Callable[[int], int]) -> None:
        self._feeds = Feeds()
        self._reserve = reserve
        self._blocks: dict[Target, int] = {}

    def follows(self, target: Target) -> bool:
        return self._feeds.follows(target)

    def follow(self, target: Target) -> None:
        try:
            self._blocks[target] = self._reserve(BLOCK)
        except QueueUnreachable:
            self._blocks[target] = time.time_ns() // 1000
        self._feeds.follow(target)

    def add(self, target: Target, completions: Iterable[Completion]) -> None:
        stamp = self._blocks.pop(target, 0)
        if self._feeds.follows(target):
            missed = self._feeds.unknown(target, completions)
            self._feeds.prepend(target, [(stamp + place, completion) for place, completion in enumerate(missed)])

    def heard(self, target: Target, completion: Completion, stamp: int) -> None:
        """The news say that a request has ended, on whichever replica."""
        self._feeds.append(target, stamp, completion)

    async def after(self, target: Target, cursor: int, timeout_s: float) -> tuple[list[Completion], int]:
        return await self._feeds.after(target, cursor, timeout_s)

    def clear(self) -> None:
        """Something may have been missed: clients ask again, and are then told what the database says."""
        self._feeds.clear()
