"""What a GPU would be asked to launch: operations that compute something, and our own kernels, by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tests.workers.model.gpu_kit  # noqa: F401  (before the kernels)
from workers.generator.gpu import kernels as decode_kernels, prefill_kernels
from workers.model.gpu import fused_kernels, kernels as adapter_kernels, single_kernels

KERNELS: dict[ModuleType, tuple[str, ...]] = {
    adapter_kernels: ("shrink", "expand", "experts", "expert_blocks", "sort_pairs"),
    single_kernels: ("shrink_row", "expand_row"),
    fused_kernels: ("swiglu", "gather", "gather_sum", "turn", "add_norm"),
    decode_kernels: ("store", "partial", "combine"),
    prefill_kernels: ("store_blocks", "attend_tiles", "copy_pages"),
}


class Launched(TorchDispatchMode):
    """Counts launches while it is entered. Kernels are counted but not run: no launch depends on numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self.kernels.total() + self.operations.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        fresh = any(leaf.untyped_storage().data_ptr() not in given for leaf in made)
        name = str(func._schema.name).removeprefix("aten::")
        if (func._schema.is_mutable or fresh) and not name.startswith(("empty", "lift", "detach")):
            self.operations[name] += 1
        return found

    def kernel(self, name: str) -> Any:
        launched = self

        class Kernel:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                def launch(*args: Any, **options: Any) -> None:
                    assert all(size > 0 for size in grid)
                    launched.kernels[name] += 1

                return launch

        return Kernel()


@contextmanager
def counted() -> Iterator[Launched]:
    launched = Launched()
    with pytest.MonkeyPatch.context() as patch, launched:
        for module, names in KERNELS.items():
            for name in names:
                patch.setattr(module, name, launched.kernel(name))
        yield launched
