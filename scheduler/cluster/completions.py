"""What has completed of each sampler's requests, on a replica that hears of it from all (`scheduler.links.broadcasts`).

Cursors are the stamps of the broadcasts, so a client may ask any replica. What the database says about the time before
a key was followed gets stamps that were reserved before it was read: whatever ends later has a later one. Stamps of a
clock that was set back may be behind a client's cursor; then they go on from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from scheduler.journal.ending.completions import Completion, FeedKey, Feeds
from scheduler.links.contract import QueueUnreachable

#: How many stamps are reserved for what one look into the database may find.
BLOCK = 10_000


class SharedFeeds:
    def __init__(self, reserve: Callable[[int], int]) -> None:
        self._feeds = feeds = Feeds()
        self.follows, self.after = feeds.follows, feeds.after
        self._reserve = reserve
        self._blocks: dict[FeedKey, int] = {}

    def follow(self, key: FeedKey, cursor: int = 0) -> None:
        try:
            stamp = self._reserve(BLOCK)
        except QueueUnreachable:
            stamp = time.time_ns() // 1000
        self._blocks[key] = max(stamp, cursor + 1)
        self._feeds.follow(key, self._blocks[key] + BLOCK - 1)

    def forget(self, key: FeedKey) -> None:
        self._blocks.pop(key, None)
        self._feeds.forget(key)

    def add(self, key: FeedKey, completions: Iterable[Completion]) -> None:
        stamp = self._blocks.pop(key, 0)
        if self._feeds.follows(key):
            missed = self._feeds.unknown(key, completions)
            many = -(-len(missed) // BLOCK)  # completions that share one stamp, if there are more than stamps
            self._feeds.prepend(key, [(stamp + place // many, completion) for place, completion in enumerate(missed)])

    def heard(self, key: FeedKey, completion: Completion, stamp: int) -> None:
        """Take in a broadcast that a request has ended, on any replica."""
        self._feeds.append(key, stamp, completion)

    def clear(self) -> None:
        """Drop all feeds, because a broadcast may have been missed: clients ask again, and get what the database
        has."""
        self._feeds.clear()
