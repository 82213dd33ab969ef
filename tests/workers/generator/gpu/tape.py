"""A stand-in for CUDA graphs on a CPU: what a function does is taken down, operation by operation and kernel by kernel,
and done again on the very same tensors. Numbers that the host knew when it was taken down stay as they were, as in a
graph; so only what is read from fixed tensors can differ from one replay to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tests.workers.model.gpu_kit  # noqa: F401  (before the kernels)
from workers.generator.gpu import kernels as decode_kernels
from workers.model.gpu import fused_kernels, kernels as adapter_kernels, single_kernels

T = TypeVar("T")

KERNELS = [(adapter_kernels, name) for name in ("shrink", "expand", "experts", "expert_blocks", "sort_pairs")]
KERNELS += [(single_kernels, name) for name in ("shrink_row", "expand_row")]
KERNELS += [(fused_kernels, name) for name in ("swiglu", "gather", "gather_sum", "turn", "add_norm")]
KERNELS += [(decode_kernels, name) for name in ("store", "partial", "combine")]

#: Operations for which the host would wait for a device.
WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"}


class Tape(TorchDispatchMode):
    """A `Capture` of workers.generator.gpu.capture."""

    def __init__(self) -> None:
        super().__init__()
        self.captured = 0
        self.replayed = 0
        self._done: list[Callable[[], None]] = []
        self._inside_kernel = False

    def __call__(self, function: Callable[[], T]) -> tuple[Callable[[], None], T]:
        self._done = done = []
        self.captured += 1
        with self, self._kernels_taken_down():
            found = function()

        def replay() -> None:
            self.replayed += 1
            for again in done:
                again()

        return replay, found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if self._inside_kernel:
            return found
        assert func._schema.name not in WAITS, f"{func} waits for the device"
        # Told by memory: some operations return a view or a copy, depending on the input.
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        fresh = [tensor for tensor in _tensors(found) if tensor.untyped_storage().data_ptr() not in given]

        def again() -> None:
            for old, new in zip(_tensors(found), _tensors(func(*args, **kwargs)), strict=True):
                if any(old is tensor for tensor in fresh):
                    old.copy_(new)

        if fresh or func._schema.is_mutable:
            self._done.append(again)
        return found

    @contextmanager
    def _kernels_taken_down(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for module, name in KERNELS:
                patch.setattr(module, name, _Kernel(getattr(module, name), self))
            yield

    def launch(self, launched: Callable[[], None]) -> None:
        self._inside_kernel = True
        launched()
        self._inside_kernel = False
        self._done.append(launched)


class _Kernel:
    def __init__(self, kernel: Any, tape: Tape) -> None:
        self._kernel, self._tape = kernel, tape

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self._tape.launch(lambda: self._kernel[grid](*args, **options))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
