"""The threads that requests work in are everybody's: of one organisation a few works are in them at a time, its further
ones wait, and take no thread from others. Lives in the event loop.

So is the interpreter, which one thread has at a time: whoever wants it waits for its turn among all that do, the event
loop too, and takes it anew after each call of the system. Beside forty threads that read or write large bodies that is
a second, beside two some hundredths. So of those works a few are under way `in_all`, of each organisation one in turn.

How long a work may take is bounded where it is asked for; here, how many are made at once, and how many requests of one
organisation may wait: when it has so many, in whichever lines, `check_line` refuses further ones where they are let in,
before anything is done for them. What has been let in is never refused: it may have been computed, and billed. A work
that has begun is made although whoever asked for it has left.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from weakref import WeakValueDictionary

from anyio import CapacityLimiter, to_thread

from api.errors import RateLimited

T = TypeVar("T")

#: As many as one address may have connections, unless it is set higher: a client's own burst is not refused. A request
#: that waits takes some 40 KB.
MOST_WAITING = 2048
#: Who finds the line full is told to come again when it has most likely moved on.
COME_AGAIN_S = 5

_waiting: Counter[str] = Counter()  # by organisation, in all lines of this process


def check_line(org_id: str) -> None:
    """Raises RateLimited for an organisation that has as many requests in line as it may."""
    if (count := _waiting[org_id]) >= MOST_WAITING:
        raise RateLimited(
            f"{count} requests of this organisation wait in line to be worked on, the limit is {MOST_WAITING}: retry "
            f"in {COME_AGAIN_S} s, and send fewer at the same moment",
            reason="waiting_requests",
            retry_after_s=COME_AGAIN_S,
            scope="organisation",
        )


class Threads:
    """`at_once` works of each organisation; of all of them `in_all`, or as many as there are threads."""

    def __init__(self, at_once: int, in_all: int | None = None) -> None:
        self.at_once = at_once
        self._all = None if in_all is None else CapacityLimiter(in_all)
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def run(self, org_id: str | None, work: Callable[[], T]) -> T:
        """`work` in a thread, when it is the organisation's turn; at once for the server itself (None)."""
        if org_id is None:
            return await to_thread.run_sync(work, limiter=self._all)
        turn = self._turns.setdefault(org_id, asyncio.Semaphore(self.at_once))
        with in_line(org_id):
            await turn.acquire()
        try:
            return await to_thread.run_sync(work, limiter=self._all)
        finally:
            turn.release()


@contextmanager
def in_line(org_id: str) -> Iterator[None]:
    """Within it a request of that organisation waits."""
    _waiting[org_id] += 1
    try:
        yield
    finally:
        _waiting[org_id] -= 1
        if not _waiting[org_id]:
            del _waiting[org_id]
