"""What is told over Redis, many at a time: what comes in one turn of the event loop, while a call is under way, and for
a moment after it began, goes with one call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Generic, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)

#: Told in one call.
MOST = 256
#: Between the beginnings of two calls, in seconds: a call costs as much as some dozen of what it may carry.
APART_S = 0.004


class Pace:
    """Keeps what is done again and again APART_S apart. What comes alone does not wait. Lives in one event loop."""

    def __init__(self) -> None:
        self._next = 0.0

    async def keep(self) -> None:
        """Until it may begin."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._next - loop.time()))
        self._next = loop.time() + APART_S


class Outbox(Generic[T]):
    """`tell` tells some, in their order. What it fails to tell is logged, and lost. Lives in one event loop."""

    def __init__(self, tell: Callable[[list[T]], Awaitable[object]]) -> None:
        self._tell = tell
        self._waiting: list[tuple[T, asyncio.Future[None]]] = []
        self._telling: asyncio.Task[None] | None = None
        self._pace = Pace()

    async def put(self, item: T) -> None:
        """Returns after the call that tells it."""
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, told))
        if self._telling is None:
            self._telling = asyncio.create_task(self._tell_all(), context=Context())  # for all, not for the first
        await told

    async def _tell_all(self) -> None:
        try:
            while self._waiting:
                await self._pace.keep()
                some, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
                try:
                    await self._tell([item for item, _ in some])
                except Exception:
                    log.exception("%d messages could not be told", len(some))
                finally:
                    for _, told in some:
                        if not told.done():  # nobody waits for it any more
                            told.set_result(None)
        finally:
            self._telling = None
