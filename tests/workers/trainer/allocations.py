"""Memory runs out at a chosen tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from workers.trainer.steps import stepping
from workers.trainer.steps.dimuon import Dimuon

NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


class Allocations(TorchDispatchMode):
    """Within it so many tensors find no memory, from the `first` on, counted from 1."""

    def __init__(self, first: int, refusals: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made = self.refused = 0
        self._refused = range(first, first + refusals)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any("Tensor" in str(each.type) and each.alias_info is None for each in func._schema.returns):
            self.made += 1
            if self.made in self._refused:
                self.refused += 1
                raise NO_MEMORY
        return func(*args, **(kwargs or {}))


class Failing(TorchDispatchMode):
    """Within it the operator of this name raises."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name, self._error = name, error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == self._name:
            raise self._error
        return func(*args, **(kwargs or {}))


#: After so many calls there is memory again. If every turn fell short at the same call, a run might never be rebuilt:
#: it begins anew if one of its steps finds no memory, and needs all of them in one go.
SHORT_CALLS = 30


@contextmanager
def short_steps(most: int) -> Iterator[Counter[str]]:
    """Memory runs out somewhere in calls that update runs, except in one of so many (0: it never does), and in those
    after SHORT_CALLS."""
    counts, call = Counter[str](), stepping._call

    def short(due: Any) -> Any:
        counts["calls"] += 1
        made = counts["calls"]
        if not most or made % most == 0 or made > SHORT_CALLS:
            return call(due)
        depth = 40 if isinstance(due[0][1], Dimuon) else 5  # any step makes at least so many tensors
        with Allocations(1 + 7 * made % depth) as allocations:
            try:
                return call(due)
            finally:
                counts["no step"] += allocations.refused

    with mock.patch.object(stepping, "_call", short):
        yield counts
