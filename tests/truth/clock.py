"""An event loop whose time is not the machine's: when nothing is left to do it jumps to the next timer.

So a program with pauses of minutes plays in milliseconds, the same program plays the same way each time, and a wait
that nobody will ever end is found at once: `Stuck`.
"""

from __future__ import annotations

import asyncio
import contextvars
import selectors
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta, tzinfo
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
    """`ahead_s` is how far the wall clock has been set forward."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        self.ahead_s = 0.0
        self._late_s = 0.0
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s

    def jump(self, seconds: float) -> None:
        """Time passes, and nobody does anything."""
        self._jumping.now_s += seconds

    def be_late(self, seconds: float) -> None:
        """What is done in a thread at present takes so much longer: whoever waits for it calls `take_late`."""
        self._late_s += seconds

    def take_late(self) -> float:
        late_s, self._late_s = self._late_s, 0.0
        return late_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a Loop. What is left when `main` ends is dropped where it stands."""
    loop = Loop()
    asyncio.set_event_loop(loop)
    loop.set_exception_handler(lambda _loop, _context: None)
    try:
        with inline_threads(), mock.patch("time.monotonic", loop.time), _wall_clock(loop):
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
        loop = asyncio.get_running_loop()
        try:
            return contextvars.copy_context().run(work, *arguments)
        finally:
            if isinstance(loop, Loop) and (late_s := loop.take_late()):
                await asyncio.sleep(late_s)

    with mock.patch("anyio.to_thread.run_sync", run_sync):
        yield


@contextmanager
def _wall_clock(loop: Loop) -> Iterator[None]:
    """What our own modules take for the date goes as the loop's clock, `loop.ahead_s` ahead."""
    began, began_ns = datetime.now().astimezone(), time.time_ns()

    class AsDatetime(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, datetime)

    class Wall(datetime, metaclass=AsDatetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            return began.astimezone(tz) + timedelta(seconds=loop.time() + loop.ahead_s)

    def ahead_ns() -> int:
        return began_ns + int((loop.time() + loop.ahead_s) * 1e9)

    rooms = ("api", "billing", "scheduler", "store", "workers")
    ours = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in rooms]
    with ExitStack() as patches:
        for module in ours:
            if getattr(module, "datetime", None) is datetime:
                patches.enter_context(mock.patch.object(module, "datetime", Wall))
        patches.enter_context(mock.patch("time.time_ns", ahead_ns))
        yield
