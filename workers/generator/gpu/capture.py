"""Work that is launched repeatedly on the same tensors: run plainly the first time, captured the second, then replayed.

The first time is the warm-up: kernels are compiled and libraries take their workspaces. Work that comes only once is
never captured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Captures what a function launches. Returns a function that launches it again, and what the captured function
#: returned, whose tensors each launch overwrites.
Capture = Callable[[Callable[[], T]], tuple[Callable[[], None], T]]


class Repeated(Generic[T]):
    """`function` launches the same work at every call; with `capture` None nothing is captured."""

    def __init__(self, function: Callable[[], T], capture: Capture[T] | None) -> None:
        self._function, self._capture = function, capture
        self._warm = False
        self._captured: tuple[Callable[[], None], T] | None = None

    def __call__(self) -> T:
        if self._captured is None and self._warm and self._capture is not None:
            try:
                self._captured = self._capture(self._function)
            except RuntimeError:
                log.warning("a decode step cannot be captured; it is launched piece by piece", exc_info=True)
                self._capture = None
        if self._captured is None:
            self._warm = True
            return self._function()
        replay, found = self._captured
        replay()
        return found


class CudaGraphs(Generic[T]):
    """Captures in CUDA graphs that share one memory pool: a result must be used before the next replay of any. What
    waits for the device cannot be captured, and fails in a rehearsal: after a capture that was broken off the allocator
    may go on as if it captured."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], T]) -> tuple[Callable[[], None], T]:
        with _waiting_fails():
            function()
        graph = torch.cuda.CUDAGraph()
        # Another thread may be reading an adapter to the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            found = function()
        return graph.replay, found


@contextmanager
def _waiting_fails() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
