"""Requests that are held open, and how all of them are answered when the server stops."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LongPolls:
    """`hold` waits on behalf of a request; `release` answers everyone who waits, now and from then on."""

    def __init__(self) -> None:
        self._held: set[asyncio.Task[Any]] = set()
        self._released = False

    async def hold(self, waiting: Coroutine[Any, Any, T], otherwise: T) -> T:
        """The result of `waiting`, or `otherwise` when the server stops first."""
        if self._released:
            waiting.close()
            return otherwise
        task = asyncio.current_task()
        assert task is not None
        self._held.add(task)
        try:
            return await waiting
        except asyncio.CancelledError:
            if not self._released:
                raise
            task.uncancel()
            return otherwise
        finally:
            self._held.discard(task)

    @property
    def released(self) -> bool:
        return self._released

    def release(self) -> None:
        self._released = True
        for task in self._held:
            task.cancel()
