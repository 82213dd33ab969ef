"""What is told over Redis, many at a time: what comes in one turn of the event loop, and while a call is under way,
goes with one call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

#: Told in one call.
MOST = 256


class Outbox(Generic[T]):
    """`tell` tells some, in their order, and does not fail. Lives in one event loop."""

    def __init__(self, tell: Callable[[list[T]], Awaitable[object]]) -> None:
        self._tell = tell
        self._waiting: list[T] = []
        self._telling: asyncio.Task[None] | None = None

    async def put(self, item: T) -> None:
        """Returns when it has been told."""
        self._waiting.append(item)
        if self._telling is None:
            self._telling = asyncio.create_task(self._tell_all())
        await asyncio.shield(self._telling)

    async def _tell_all(self) -> None:
        try:
            await asyncio.sleep(0)
            while self._waiting:
                some, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
                await self._tell(some)
        finally:
            self._telling = None
