"""What has completed of each sampler's requests, on a replica that hears of it from all (`scheduler.links.broadcasts`).

Cursors are the stamps of the news, so a client may ask any replica. What the database says about the time before a
target was followed gets stamps that were reserved before it was read: whatever ends later has a later one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from scheduler.journal.completions import Completion, Completions, Target
from scheduler.links.contract import QueueUnreachable

#: Stamps for what one look into the database may find.
BLOCK = 10_000


class SharedCompletions(Completions):
    def __init__(self, reserve: Callable[[int], int]) -> None:
        super().__init__()
        self._reserve = reserve
        self._blocks: dict[Target, int] = {}

    def follow(self, target: Target) -> None:
        try:
            self._blocks[target] = self._reserve(BLOCK)
        except QueueUnreachable:
            self._blocks[target] = time.time_ns() // 1000
        super().follow(target)

    def add(self, target: Target, completions: Iterable[Completion]) -> None:
        feed, stamp = self._feeds.get(target), self._blocks.pop(target, 0)
        if feed is None:
            return
        known = {completion.request_id for _, completion in feed.events}
        missed = [completion for completion in completions if completion.request_id not in known]
        feed.events.extendleft(reversed([(stamp + place, completion) for place, completion in enumerate(missed)]))
        feed.news.set()

    def publish(self, target: Target, completion: Completion) -> None:
        """The news tell it, to this replica too."""

    def heard(self, target: Target, completion: Completion, stamp: int) -> None:
        feed = self._feeds.get(target)
        if feed is not None:
            feed.events.append((stamp, completion))
            feed.news.set()

    async def after(self, target: Target, cursor: int, timeout_s: float) -> tuple[list[Completion], int]:
        if target not in self._feeds:
            return [], cursor
        return await super().after(target, cursor, timeout_s)

    def clear(self) -> None:
        """Something may have been missed: whoever waits asks again, and is then told what the database says."""
        feeds = list(self._feeds.values())
        self._feeds.clear()
        for feed in feeds:
            feed.news.set()
