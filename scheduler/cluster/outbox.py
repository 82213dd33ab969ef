"""Batching of Redis messages and database look-ups: items that come in one turn of the event loop, while a call is
under way, or within a few milliseconds of its start, go out with one call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

log = logging.getLogger(__name__)

#: The most items of one call.
MOST = 256
#: The least time between the starts of two calls, in seconds: a call costs about as much as some dozen items in it.
APART_S = 0.004


class _Spacing:
    """Keeps repeated calls at least APART_S apart; a single call does not wait. Lives in one event loop."""

    def __init__(self) -> None:
        self._next = 0.0

    async def wait(self) -> None:
        """Wait until the next call may start."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._next - loop.time()))
        self._next = loop.time() + APART_S


class Gathered(Generic[T, R]):
    """Batches items: `do` takes some items, in order, and returns one result for each. Lives in one event loop."""

    def __init__(self, do: Callable[[list[T]], Awaitable[list[R]]]) -> None:
        self._do = do
        self._waiting: list[tuple[T, asyncio.Future[R]]] = []
        self._doing: asyncio.Task[None] | None = None
        self._spacing = _Spacing()

    async def get(self, item: T) -> R:
        """The result for `item`, after the call that takes it. Raises what that call raises."""
        done: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, done))
        if self._doing is None:
            # without the context of the item that happens to come first
            self._doing = asyncio.create_task(self._do_all(), context=Context())
        return await done

    async def _do_all(self) -> None:
        try:
            while self._waiting:
                await self._spacing.wait()
                some, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
                await self._answer(some)
        finally:
            self._doing = None

    async def _answer(self, some: list[tuple[T, asyncio.Future[R]]]) -> None:
        try:
            results = await self._do([item for item, _ in some])
        except Exception as error:
            for _, done in some:
                if not done.done():  # unless its caller gave up
                    done.set_exception(error)
            return
        for (_, done), result in zip(some, results, strict=True):
            if not done.done():
                done.set_result(result)


class Outbox(Generic[T]):
    """Sends items in batches: `tell` takes some, in order. A failure is logged and the items are lost. Lives in one
    event loop."""

    def __init__(self, tell: Callable[[list[T]], Awaitable[object]]) -> None:
        self._tell = tell
        self._gathered = Gathered(self._try)

    async def put(self, item: T) -> None:
        """Returns after the call that sends `item`."""
        await self._gathered.get(item)

    async def _try(self, items: list[T]) -> list[None]:
        try:
            await self._tell(items)
        except Exception:
            log.exception("%d messages could not be told", len(items))
        return [None] * len(items)
