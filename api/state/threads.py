"""The threads that requests work in are everybody's: of one organisation a few works are in them at a time, its further
ones wait, and take no thread from others. Lives in the event loop.

How long a work may take is bounded where it is asked for; here, how many are made at once. It is made although whoever
asked for it has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakValueDictionary

from starlette.concurrency import run_in_threadpool

T = TypeVar("T")


class Threads:
    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def run(self, org_id: str | None, work: Callable[[], T]) -> T:
        """`work` in a thread, when it is the organisation's turn; at once for the server itself (None)."""
        if org_id is None:
            return await run_in_threadpool(work)
        turn = self._turns.setdefault(org_id, asyncio.Semaphore(self.at_once))
        async with turn:
            return await run_in_threadpool(work)
