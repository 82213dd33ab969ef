"""One event loop in a daemon thread, on which all of the client's requests run.

Users call from any thread, or from their own event loop; nothing they do there (a long step of numpy, a blocked loop)
delays heartbeats and polls here. Shared by all clients of the process.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """A running event loop. Work submitted from one thread starts in the order it was submitted."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._serve, name="weft", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def here(self) -> bool:
        """Whether the caller is on the loop's own thread, where waiting would deadlock."""
        return threading.current_thread() is self.thread


@functools.cache
def _background() -> Background:
    return Background()


_creating = threading.Lock()


def background() -> Background:
    """The process's one loop. Two threads may ask for it first at the same moment, which the cache does not order."""
    with _creating:
        return _background()
