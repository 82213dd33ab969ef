"""An event loop with a time of its own: when nothing is left to do, its clock jumps to the next timer.

So a program with pauses of minutes plays in milliseconds and always in the same way, and a wait that nothing can end is
found at once: `Stuck`."""

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
    """Every task waits for another one."""


class _Jumping(selectors.SelectSelector):
    """A selector that does not sleep, but moves the loop's clock."""

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
        """Let time pass while nobody does anything."""
        self._jumping.now_s += seconds

    def be_late(self, seconds: float) -> None:
        """Make the present work of a thread take longer; whoever waits for the thread calls `take_late`."""
        self._late_s += seconds

    def take_late(self) -> float:
        late_s, self._late_s = self._late_s, 0.0
        return late_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a Loop. When `main` ends, all other tasks are dropped where they are."""
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
    """Do what is handed to a thread of the pool at once, in this thread, so that everything comes in a fixed order."""

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
    """Our own modules read the loop's clock, `loop.ahead_s` ahead, as the date."""
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
