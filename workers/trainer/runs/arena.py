"""The memory of one run: weights, moments and gradient in one flat float32 tensor, so that paging is one copy.

Arenas are recycled between runs and are not cleared: a run writes a section before it reads it (`RunState` says which
sections hold something), and nothing else is ever read or paged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from workers.model.adapters.adapter import Adapter
from workers.model.adapters.shape import AdapterShape

BYTES = 4  # of a float32


@dataclass(frozen=True)
class ArenaKind:
    """The layout of a run's arena: weights, `moments` moments, gradient, each [shape.numel]."""

    shape: AdapterShape
    scale: float
    moments: int

    @cached_property
    def size_bytes(self) -> int:
        return (self.moments + 2) * self.shape.numel * BYTES


class Arena:
    """`flat` and its sections. `v` is empty for an optimizer with one moment."""

    def __init__(self, kind: ArenaKind, device: torch.device) -> None:
        self.kind = kind
        self.flat = torch.empty((kind.moments + 2) * kind.shape.numel, device=device)
        weights, *moments, gradient = self.flat.view(kind.moments + 2, -1).unbind()
        self.weights = Adapter(kind.shape, weights, kind.scale)
        self.gradient = Adapter(kind.shape, gradient, kind.scale)
        self.m: Tensor = moments[0]
        self.v: Tensor = moments[1] if kind.moments > 1 else self.flat.new_empty(0)

    @classmethod
    def of_guest(cls, kind: ArenaKind, weights: Adapter, *, trains: bool) -> Arena:
        """An arena with the `weights` of a run whose home is another rank, and no moments. If it `trains` it has a
        gradient of its own, otherwise one that takes no memory."""
        arena = cls.__new__(cls)
        arena.kind, arena.weights = kind, weights
        arena.flat = torch.empty_like(weights.flat, device=None if trains else "meta")
        arena.gradient = Adapter(kind.shape, arena.flat, kind.scale)
        arena.m = arena.v = arena.flat.new_empty(0)
        return arena

    def used(self, with_gradient: bool) -> Tensor:
        """The part of the arena that a page must contain."""
        return self.flat if with_gradient else self.flat[: self.flat.numel() - self.gradient.flat.numel()]


#: Gives a new run its arena.
TakeArena = Callable[[ArenaKind], Arena]


class Arenas:
    """Makes arenas, and keeps those given back for the next run of the same kind, within `budget_bytes` for all that
    exist. Not thread safe: belongs to the pager's thread."""

    def __init__(self, budget_bytes: int, device: torch.device) -> None:
        self.budget_bytes, self.device = budget_bytes, device
        self.size_bytes = 0  # of all existing arenas
        self.peak_bytes = 0
        self._free: list[Arena] = []

    def take(self, kind: ArenaKind) -> Arena:
        """An arena with arbitrary contents. It may exceed the budget: the pager, who asks, has decided that."""
        for i in reversed(range(len(self._free))):
            if self._free[i].kind == kind:
                return self._free.pop(i)
        while self._free and self.size_bytes + kind.size_bytes > self.budget_bytes:
            self._drop(self._free.pop(0))
        try:
            arena = Arena(kind, self.device)
        except (RuntimeError, MemoryError):
            if not self._free:
                raise
            self.trim()
            arena = Arena(kind, self.device)
        self.size_bytes += kind.size_bytes
        self.peak_bytes = max(self.peak_bytes, self.size_bytes)
        return arena

    def give(self, arena: Arena) -> None:
        """Give an arena back that nobody reads any more."""
        if self.size_bytes > self.budget_bytes:
            self._drop(arena)
        else:
            self._free.append(arena)

    def trim(self) -> None:
        """Return the memory of free arenas to the machine."""
        while self._free:
            self._drop(self._free.pop())

    def _drop(self, arena: Arena) -> None:
        self.size_bytes -= arena.kind.size_bytes
