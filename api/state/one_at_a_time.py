"""Questions to what may not answer: a database that is frozen keeps whoever asks it for as long as it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

#: Longer than a database that is well takes, and shorter than probes wait.
WITHIN_S = 5.0


class OneAtATime(Generic[T]):
    """One question, asked once at a time however many want to know, so that probes do not take all threads. Lives in
    the event loop."""

    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        self._ask = ask
        self._asking: asyncio.Future[T] | None = None

    async def __call__(self) -> T:
        """Raises TimeoutError when there is no answer within WITHIN_S, and what asking raises."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._ask())
        return await asyncio.wait_for(asyncio.shield(self._asking), WITHIN_S)
