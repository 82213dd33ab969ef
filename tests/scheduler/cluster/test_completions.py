"""A replica names each finished request of a sampler once, whatever its stamps were."""

from __future__ import annotations

import asyncio

from scheduler.cluster.completions import BLOCK, SharedFeeds
from scheduler.journal.ending.completions import Completion, FeedKey

KEY = FeedKey("o", "s", 0)


def told(feeds: SharedFeeds, cursor: int = 0) -> list[str]:
    """What a client is told that asks until there is nothing more."""
    found = list[str]()
    while True:
        events, after = asyncio.run(feeds.after(KEY, cursor, 0))
        if not events:
            return found
        assert after > cursor
        cursor = after
        found += [event.request_id for event in events]


def test_more_than_a_block_was_missed_and_the_next_comes_behind_it() -> None:
    missed = [Completion(str(number), 1) for number in range(2 * BLOCK + 5)]
    feeds = SharedFeeds(lambda count: 1_000)
    feeds.follow(KEY)
    feeds.add(KEY, missed)
    feeds.heard(KEY, Completion("next", 1), 1_000 + BLOCK)
    assert told(feeds) == [*(each.request_id for each in missed), "next"]


def test_stamps_behind_the_cursor_hide_nothing() -> None:
    """Redis is empty, the servers have been restarted, and the clock was set back."""
    ahead = 10**15
    feeds = SharedFeeds(lambda count: 1_000)
    feeds.follow(KEY, ahead)
    feeds.heard(KEY, Completion("while it was read", 1), 1_000 + BLOCK)
    feeds.add(KEY, [Completion("missed", 1)])
    feeds.heard(KEY, Completion("next", 1), 1_001 + BLOCK)
    assert told(feeds, ahead) == ["missed", "while it was read", "next"]
