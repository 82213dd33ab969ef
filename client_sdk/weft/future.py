"""`APIFuture`: a result that is being fetched, for code with and without an event loop; and the thread that fetches it.

All of the client's requests run on one event loop in a daemon thread, shared by all clients of the process. Users call
from any thread, or from their own event loop; nothing they do there (a long step of numpy, a blocked loop) delays
heartbeats and polls here.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar
from weakref import WeakSet

from weft.errors import WeftError

T = TypeVar("T")
S = TypeVar("S")
P = ParamSpec("P")


class Background:
    """A running event loop. Work submitted from one thread starts in the order it was submitted."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.started: WeakSet[Future[Any]] = WeakSet()
        self.thread = threading.Thread(target=self._serve, name="weft", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` on the loop."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        self.started.add(future)
        return future

    def here(self) -> bool:
        """True if the caller is on the loop's own thread, where waiting would deadlock."""
        return threading.current_thread() is self.thread


@functools.cache
def _background() -> Background:
    return Background()


_creating = threading.Lock()


def background() -> Background:
    """The one event loop of this process. The lock is needed because two threads may ask for it first at the same
    moment."""
    with _creating:
        return _background()


#: Futures that the end of the process waits for, and for how long it waits for all of them together.
_before_exit: set[Future[Any]] = set()
EXIT_S = 10.0
_waited = False


def finish_before_exit(future: Future[Any]) -> None:
    """Make the end of the process wait for `future`, whether or not anybody else does: the loop's thread is a daemon,
    which would die with it. Called from a function of `atexit`, when the process already ends, it waits at once."""
    _before_exit.add(future)
    future.add_done_callback(_before_exit.discard)
    if not _at_exit() or _waited:
        wait({future}, EXIT_S)


@functools.cache
def _at_exit() -> bool:
    """Register the wait at the end of the process. Returns False if the end has already begun."""
    try:
        # `_register_atexit` runs before the interpreter stops its thread pools, which looking up a host name needs.
        getattr(threading, "_register_atexit", atexit.register)(_wait_before_exit)
    except RuntimeError:
        return False
    return True


def _wait_before_exit() -> None:
    global _waited
    wait(_before_exit, EXIT_S)
    _waited = True


def _forked() -> None:
    """After a fork, in the child: it has the parent's loop but not its thread. The child starts a loop of its own when
    it needs one; futures of work that was under way fail here, and end in the parent."""
    global _creating
    _creating = threading.Lock()
    _before_exit.clear()
    if _background.cache_info().currsize:
        for future in [future for future in _background().started if not future.done()]:
            future.set_exception(WeftError("this was under way when the process was forked, and ends in its parent"))
    _background.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


async def outlasting(work: Awaitable[T]) -> T:
    """The result of `work`, which goes on when the waiting task is cancelled. Its result is then dropped:
    `asyncio.shield` would log its exception as never retrieved."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.wait((task,))
    return task.result()


class APIFuture(Generic[T]):
    """A result that is being fetched in the background, whether or not anybody waits for it.

    `result()` blocks, `await` does not. Giving up on waiting (a timeout, a cancelled task) leaves the operation alone;
    `cancel()` abandons it.
    """

    def __init__(self, future: Future[T]) -> None:
        self._future = future
        self._told = False

    @property
    def known(self) -> bool:
        """True if the caller can know how the work ended: it succeeded, or somebody who waited for it got the error.
        Giving up on waiting does not count."""
        return self._told or (self._future.done() and not self._future.cancelled() and self._future.exception() is None)

    @classmethod
    def start(cls, work: Coroutine[Any, Any, T]) -> APIFuture[T]:
        """Start `work` in the background."""
        return cls(background().run(work))

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result, at most `timeout` seconds (`TimeoutError`)."""
        if background().here() and not self._future.done():
            raise RuntimeError("result() would block the client's own event loop; use await")
        with self._telling():
            return self._future.result(timeout)

    async def result_async(self, timeout: float | None = None) -> T:  # noqa: ASYNC109
        """Wait for the result in any event loop, at most `timeout` seconds (`TimeoutError`)."""
        with self._telling():
            return await asyncio.wait_for(outlasting(asyncio.wrap_future(self._future)), timeout)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            ended = self._future.done()
            self._told |= ended and (self._future.cancelled() or error is self._future.exception())
            raise

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    async def coroutine(self) -> T:
        """The result as a coroutine, for functions that take only coroutines."""
        return await self

    def future(self) -> Future[T]:
        """The same as a `concurrent.futures.Future`."""
        return self._future

    def done(self) -> bool:
        """True if the result, or an error, is there."""
        return self._future.done()

    def cancel(self) -> bool:
        """Abandon it. A sample stops being generated; a training operation already called is executed all the same."""
        return self._future.cancel()

    if not TYPE_CHECKING:  # for type checkers an unknown attribute stays a mistake

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}: it is a result that is being fetched, which"
                " .result() or await gives"
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({state_of(self._future)})"


def state_of(future: Future[Any]) -> str:
    """The state in a few words: "pending", "cancelled", the error, or the type of the result. Never the result itself,
    which may be long or a signed link."""
    if not future.done():
        return "pending"
    if future.cancelled():
        return "cancelled"
    if error := future.exception():
        return f"failed: {type(error).__name__}: {error}"
    return f"done: {type(future.result()).__name__}"


def twin(
    method: Callable[Concatenate[S, P], Awaitable[T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """`x_async` of a method `x`: the same arguments, awaited for the result itself."""

    @functools.wraps(method)
    async def awaited(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await method(self, *args, **kwargs)

    awaited.__name__ = f"{method.__name__}_async"
    awaited.__doc__ = f"`{method.__name__}`, awaited."
    return awaited


def future_twin(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """`x_async` of a method `x` that returns a future: the future, not yet its result, as in Tinker's SDK."""

    @functools.wraps(method)
    async def started(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self, *args, **kwargs)

    started.__name__ = f"{method.__name__}_async"
    started.__doc__ = f"`{method.__name__}`; the future, not yet its result."
    return started


def cancelling_twin(
    method: Callable[Concatenate[S, P], APIFuture[T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """`x_async` of a method `x`: the same arguments, awaited. Cancelling the task cancels the operation."""

    @functools.wraps(method)
    async def awaited(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        future = method(self, *args, **kwargs)
        try:
            return await future
        except asyncio.CancelledError:
            future.cancel()
            raise

    awaited.__name__ = f"{method.__name__}_async"
    awaited.__doc__ = f"`{method.__name__}`, awaited. Cancelling the task stops it."
    return awaited


class Pending(Generic[T]):
    """A client that can be used at once although the server is still making it.

    Its operations wait their turn behind its making. `result()` or `await` waits for it and returns the client itself,
    and is where the error surfaces if it could not be made.
    """

    _made: Future[T]

    def result(self, timeout: float | None = None) -> T:
        """The client itself, once the server has made it."""
        return APIFuture(self._made).result(timeout)

    async def result_async(self, timeout: float | None = None) -> T:  # noqa: ASYNC109
        """The client itself, once the server has made it."""
        return await APIFuture(self._made).result_async(timeout)

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    def future(self) -> Future[T]:
        """The same as a `concurrent.futures.Future`."""
        return self._made
