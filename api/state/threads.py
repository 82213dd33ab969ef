"""Requests work in threads that all organisations share: only a few works of one organisation are in them at a time;
its others wait without taking a thread. Lives in the event loop.

The interpreter is shared, too: one thread has it at a time, and every thread, the event loop's too, waits for its turn
and must take it anew after each system call. Beside forty threads that read or write large bodies that takes a second,
beside two some hundredths. So only `in_all` such works run at a time, one of each organisation.

The caller bounds how long a work may take. Here it is bounded how many run at once, and how many requests of one
organisation may wait: beyond that, in all lines together, `check_line` refuses further requests at their start, before
anything is done for them. A request that was let in is never refused here: it may have been computed, and billed. A
work that has begun is finished even if its client has left.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar
from weakref import WeakValueDictionary

from anyio import CapacityLimiter, to_thread

from api.errors import RateLimited
from api.state.counted import counted

T = TypeVar("T")

#: As many as one address may have connections by default, so that a client's own burst is not refused. A waiting
#: request takes some 40 KB.
MOST_WAITING = 2048
#: After how many seconds a refused client is told to come again: by then the queue has most likely moved on.
COME_AGAIN_S = 5

_waiting: Counter[str] = Counter()  # by organisation: waiting requests in all queues of this process


def check_line(org_id: str) -> None:
    """Raise RateLimited if the organisation has as many requests waiting as it may."""
    if (count := _waiting[org_id]) >= MOST_WAITING:
        raise RateLimited(
            f"{count} requests of this organisation wait in line to be worked on, the limit is {MOST_WAITING}: retry "
            f"in {COME_AGAIN_S} s, and send fewer at the same moment",
            reason="waiting_requests",
            retry_after_s=COME_AGAIN_S,
            scope="organisation",
        )


class Threads:
    """Runs `at_once` works of each organisation, and `in_all` of all together (None: as many as there are threads)."""

    def __init__(self, at_once: int, in_all: int | None = None) -> None:
        self.at_once = at_once
        self._all = None if in_all is None else CapacityLimiter(in_all)
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def run(self, org_id: str | None, work: Callable[[], T]) -> T:
        """Run `work` in a thread, in the organisation's turn; at once for the server itself (None)."""
        if org_id is None:
            return await to_thread.run_sync(work, limiter=self._all)
        turn = self._turns.setdefault(org_id, asyncio.Semaphore(self.at_once))
        with in_line(org_id):
            await turn.acquire()
        try:
            return await to_thread.run_sync(work, limiter=self._all)
        finally:
            turn.release()


def in_line(org_id: str) -> AbstractContextManager[None]:
    """Count a request of that organisation as waiting, during the block."""
    return counted(_waiting, org_id)
