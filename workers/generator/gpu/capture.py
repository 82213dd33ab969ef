"""Work launched repeatedly on the same tensors: the first time it runs plainly, the second time it is captured, then it
is replayed.

The first time is the warm-up, in which kernels are compiled and libraries allocate their workspaces. Work needed only
once is never captured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Operations that make the host wait for the device: their result is a number on the host, or its size depends on
#: values. COPIES make it wait if they go from one device to another.
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount", "equal"}
COPIES = {"copy_", "_to_copy"}

#: Captures the launches of a function. Returns a function that replays them, and the captured function's result, whose
#: tensors each replay overwrites.
Capture = Callable[[Callable[[], T]], tuple[Callable[[], None], T]]


class Repeated(Generic[T]):
    """Calls `function`, which must launch the same work each time, or replays its capture. `capture` None: never
    captures."""

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
    """Captures in CUDA graphs that share one memory pool, so a result must be used before any of the graphs is
    replayed. Work that makes the host wait cannot be captured; a rehearsal finds it before, because after an aborted
    capture torch's allocator may go on as if it were capturing."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], T]) -> tuple[Callable[[], None], T]:
        with NeverWaits():  # type: ignore[no-untyped-call]
            function()
        graph = torch.cuda.CUDAGraph()
        # Another thread may be copying an adapter to the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            found = function()
        return graph.replay, found


class NeverWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In the block, on this thread, any operation that would make the host wait for the device raises RuntimeError.
    (torch's own sync debug mode holds for all threads, so it would fail the thread that reads adapters.)"""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, found)) if isinstance(leaf, Tensor)]
        name = func._schema.name.removeprefix("aten::")
        crosses = name in COPIES and len({leaf.device.type for leaf in tensors}) > 1
        masked = name.startswith("index") and any(leaf.dtype in (torch.bool, torch.uint8) for leaf in tensors)
        if name in WAITS or crosses or masked:
            raise RuntimeError(f"{name} waits for the device")
        return found
