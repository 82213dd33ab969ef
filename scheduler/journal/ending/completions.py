"""What has completed of each sampler's requests, for clients that wait for all of them with one poll.

A feed is of one sampler and one client of it. Only feeds that a client has asked for are kept; what they missed
before comes from the journal's rows (`api.routes.computing.completions`). An event has a cursor, which only grows:
microseconds of the clock, so that a cursor from before a restart still says where its client stands. Asking for what is
after a cursor forgets what is not. Lives in one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Protocol

#: Each client of a sampler numbers its requests in a block of this size.
CLIENT_STRIDE = 1_000_000_000
#: How many completions one answer may name; all those that share the last one's cursor are added.
MAX_EVENTS = 2000
#: How many feeds are kept. Beyond it the feed that was asked for longest ago is forgotten, and read again when its
#: client comes back.
MAX_FEEDS = 4096


@dataclass(frozen=True)
class FeedKey:
    org_id: str
    sampler_id: str
    client: int

    @staticmethod
    def of(org_id: str, sampler_id: str, seq: int) -> FeedKey:
        return FeedKey(org_id, sampler_id, seq // CLIENT_STRIDE)


@dataclass(frozen=True)
class Completion:
    """`size_bytes` of the result; None if the request failed."""

    request_id: str
    size_bytes: int | None


class CompletionFeeds(Protocol):
    """The feeds of this process: of requests that complete here, or of broadcasts from all replicas."""

    def follows(self, key: FeedKey) -> bool: ...

    def follow(self, key: FeedKey, cursor: int = 0) -> None:
        """Keep completions of this feed from now on. A client whose `cursor` is ahead of the clock (it was set back)
        still gets all of them."""

    def forget(self, key: FeedKey) -> None:
        """Stop following: the completions before `follow` could not be read. Clients ask again, and it starts anew."""

    def add(self, key: FeedKey, completions: Iterable[Completion]) -> None:
        """Add completions from before `follow`, as the journal's rows have them; known ones are not repeated."""

    async def after(self, key: FeedKey, cursor: int, timeout_s: float) -> tuple[list[Completion], int]:
        """The completions after `cursor`, and the new cursor. If there are none, waits for one at most `timeout_s`."""


@dataclass
class _Feed:
    events: deque[tuple[int, Completion]] = field(default_factory=deque)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    waiters: int = 0
    newest: int = 0  # the cursor of the newest event


class Feeds:
    """Events by feed. The caller of `append` gives the cursor."""

    def __init__(self) -> None:
        self._feeds: OrderedDict[FeedKey, _Feed] = OrderedDict()

    def follows(self, key: FeedKey) -> bool:
        return key in self._feeds

    def follow(self, key: FeedKey, cursor: int = 0) -> None:
        feed = self._feeds.setdefault(key, _Feed())
        feed.newest = max(feed.newest, cursor)
        idle = [t for t, feed in self._feeds.items() if not feed.waiters and t != key]
        for other in idle[: max(0, len(self._feeds) - MAX_FEEDS)]:
            del self._feeds[other]

    def forget(self, key: FeedKey) -> None:
        feed = self._feeds.pop(key, None)
        if feed is not None:
            feed.changed.set()

    def unknown(self, key: FeedKey, completions: Iterable[Completion]) -> list[Completion]:
        """The completions among these that the feed does not have yet."""
        known = {completion.request_id for _, completion in self._feeds[key].events}
        return [completion for completion in completions if completion.request_id not in known]

    def append(self, key: FeedKey, cursor: int, completion: Completion) -> None:
        feed = self._feeds.get(key)
        if feed is not None:
            feed.newest = max(cursor, feed.newest + 1)
            feed.events.append((feed.newest, completion))
            feed.changed.set()

    def prepend(self, key: FeedKey, events: list[tuple[int, Completion]]) -> None:
        """Insert events before all others of the feed."""
        feed = self._feeds[key]
        feed.events.extendleft(reversed(events))
        feed.changed.set()

    def clear(self) -> None:
        """Forget every feed, and wake the clients that follow them, so that they ask again."""
        feeds = list(self._feeds.values())
        self._feeds.clear()
        for feed in feeds:
            feed.changed.set()

    async def after(self, key: FeedKey, cursor: int, timeout_s: float) -> tuple[list[Completion], int]:
        feed = self._feeds.get(key)
        if feed is None:
            return [], cursor
        self._feeds.move_to_end(key)
        while feed.events and feed.events[0][0] <= cursor:
            feed.events.popleft()
        if not feed.events and timeout_s > 0:
            await self._wait(feed, timeout_s)
        events = list(islice(feed.events, MAX_EVENTS))
        of_one_cursor = takewhile(lambda event: event[0] == events[-1][0], islice(feed.events, MAX_EVENTS, None))
        events += list(of_one_cursor)  # the next poll asks for what is after this cursor
        return [completion for _, completion in events], events[-1][0] if events else cursor

    async def _wait(self, feed: _Feed, timeout_s: float) -> None:
        feed.changed.clear()
        feed.waiters += 1
        try:
            await asyncio.wait_for(feed.changed.wait(), timeout_s)
        except TimeoutError:
            pass
        finally:
            feed.waiters -= 1


def _now_us() -> int:
    return time.time_ns() // 1000


class LocalFeeds:
    """Feeds of requests that complete in this process. Cursors are from its clock."""

    def __init__(self, now_us: Callable[[], int] = _now_us) -> None:
        self._now_us = now_us
        self._last = 0
        self._feeds = feeds = Feeds()
        self.follows, self.follow, self.forget, self.after = feeds.follows, feeds.follow, feeds.forget, feeds.after

    def add(self, key: FeedKey, completions: Iterable[Completion]) -> None:
        if self._feeds.follows(key):
            for completion in self._feeds.unknown(key, completions):
                self.publish(key, completion)

    def publish(self, key: FeedKey, completion: Completion) -> None:
        """Tell the feed's readers that a request has ended, and that its outcome can be fetched."""
        if self._feeds.follows(key):
            self._last = max(self._last + 1, self._now_us())
            self._feeds.append(key, self._last, completion)
