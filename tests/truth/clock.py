"""An event loop whose time is not the machine's: when nothing is left to do it jumps to the next timer.

So a program with pauses of minutes plays in milliseconds, the same program plays the same way each time, and a wait
that nobody will ever end is found at once: `Stuck`.
"""

from __future__ import annotations

import asyncio
import contextvars
import selectors
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

T = TypeVar("T")


class Stuck(BaseException):
    """Everybody waits for somebody else."""


class _Jumping(selectors.SelectSelector):
    """Never sleeps: moves the loop's clock instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise Stuck("no timer is set, and nothing is left that could wake anybody")
        self.now_s += max(0.0, timeout)
        return ready


class Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s

    def jump(self, seconds: float) -> None:
        """The clock is set forward."""
        self._jumping.now_s += seconds


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a Loop. What is left when `main` ends is dropped where it stands."""
    loop = Loop()
    asyncio.set_event_loop(loop)
    loop.set_exception_handler(lambda _loop, _context: None)
    try:
        with inline_threads(), mock.patch("time.monotonic", loop.time):
            return loop.run_until_complete(main)
    finally:
        with inline_threads():
            for task in asyncio.all_tasks(loop):
                task.cancel()
            for _ in range(20):
                loop.call_soon(loop.stop)
                loop.run_forever()
        asyncio.set_event_loop(None)
        loop.close()


@contextmanager
def inline_threads() -> Iterator[None]:
    """What is handed to a thread of the pool is done at once instead, so that things always come in one order."""

    async def run_sync(work: Callable[..., T], *arguments: Any, **_options: Any) -> T:
        await asyncio.sleep(0)
        return contextvars.copy_context().run(work, *arguments)

    with mock.patch("anyio.to_thread.run_sync", run_sync):
        yield
