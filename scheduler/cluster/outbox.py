"""What is told over Redis or looked up in the database, many at a time: what comes in one turn of the event loop, while
a call is under way, and for a moment after it began, goes with one call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

log = logging.getLogger(__name__)

#: In one call.
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


class Gathered(Generic[T, R]):
    """`do` does some, in their order, and gives what comes of each. Lives in one event loop."""

    def __init__(self, do: Callable[[list[T]], Awaitable[list[R]]]) -> None:
        self._do = do
        self._waiting: list[tuple[T, asyncio.Future[R]]] = []
        self._doing: asyncio.Task[None] | None = None
        self._pace = Pace()

    async def get(self, item: T) -> R:
        """Returns after the call that does it. Raises what the call raises."""
        done: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, done))
        if self._doing is None:
            self._doing = asyncio.create_task(self._do_all(), context=Context())  # for all, not for the first
        return await done

    async def _do_all(self) -> None:
        try:
            while self._waiting:
                await self._pace.keep()
                some, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
                await self._answer(some)
        finally:
            self._doing = None

    async def _answer(self, some: list[tuple[T, asyncio.Future[R]]]) -> None:
        try:
            results = await self._do([item for item, _ in some])
        except Exception as error:
            for _, done in some:
                if not done.done():  # nobody waits for it any more
                    done.set_exception(error)
            return
        for (_, done), result in zip(some, results, strict=True):
            if not done.done():
                done.set_result(result)


class Outbox(Generic[T]):
    """`tell` tells some, in their order. What it fails to tell is logged, and lost. Lives in one event loop."""

    def __init__(self, tell: Callable[[list[T]], Awaitable[object]]) -> None:
        self._tell = tell
        self._gathered = Gathered(self._try)

    async def put(self, item: T) -> None:
        """Returns after the call that tells it."""
        await self._gathered.get(item)

    async def _try(self, items: list[T]) -> list[None]:
        try:
            await self._tell(items)
        except Exception:
            log.exception("%d messages could not be told", len(items))
        return [None] * len(items)
