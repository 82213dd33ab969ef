"""The low-rank products of all groups of a batch on a CPU, one call for each factor.

`u` is [rows, stack * max_rank] float32; a group uses the first stack * rank columns of its rows, part beside part.
Columns beyond them, and rows of groups without the tensor, keep their values.

Shapes: G groups, E experts, R = E * G segments (one of a group and an expert).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.model.adapters.adapter import Adapter
from workers.model.adapters.shape import Slot
from workers.model.lora.rows import LoraRows
from workers.model.native.build import library
from workers.model.native.gemm import rows_at
from workers.model.routing import Routing

_NOBODY = 0
#: Stands for rows that a call does not have: no address, stride 0.
_NOTHING = (None, ctypes.c_int64(0))
#: The most factors that kernels.c takes in one call.
PARTS = 3

#: Factors whose outputs lie side by side: the name and the width of each.
Parts = Sequence[tuple[str, int]]


class _Array:
    """An array for the kernels, with its address kept: NumPy takes as long to return it as a small kernel runs."""

    def __init__(self, values: Sequence[float] | NDArray[Any], dtype: type[np.generic] = np.int64) -> None:
        self.values = np.ascontiguousarray(values, dtype=dtype)
        self.address = self.values.ctypes.data

    def __len__(self) -> int:
        return len(self.values)


class Table:
    """The adapters of one batch: their ranks and scales, and where their tensors lie."""

    def __init__(self, rows: LoraRows) -> None:
        # Not the rows themselves: they are the weak key of this table.
        self.adapters, self.grads = rows.adapters, rows.grads
        ranks = [0 if adapter is None else adapter.rank for adapter in rows.adapters]
        self.max_rank = max(ranks, default=0)
        self.ranks_G = _Array(ranks)
        scales = [0.0 if adapter is None else adapter.scale for adapter in rows.adapters]
        self.scales_G = _Array(scales, np.float32)
        self.segment = rows.group_of_row(torch.device("cpu"))
        self._addresses: dict[tuple[str, bool], _Array] = {}
        #: The prepared arguments of `NativeProducts.linear` and `factor`, by what these were called with.
        self.linears: dict[tuple[object, ...], ctypes.Array[Factor]] = {}
        self.factors: dict[tuple[object, ...], Factor] = {}
        self._arenas: dict[bool, list[tuple[int, dict[str, Slot]]]] = {}

    def addresses(self, name: str, *, grads: bool) -> _Array:
        """[G]: the address of the tensor `name` in each adapter (or its gradient); 0 if there is none."""
        found = self._addresses.get((name, grads))
        if found is None:
            arenas = self.grads if grads else self.adapters
            if grads not in self._arenas:
                self._arenas[grads] = [_arena_address(arena) for arena in arenas]
            found = _Array(
                [at + 4 * slots[name].offset if name in slots else _NOBODY for at, slots in self._arenas[grads]]
            )
            self._addresses[name, grads] = found
        return found


def _arena_address(arena: Adapter | None) -> tuple[int, dict[str, Slot]]:
    return (_NOBODY, {}) if arena is None else (arena.flat.data_ptr(), arena.shape.slots)


_TABLES: WeakKeyDictionary[LoraRows, Table] = WeakKeyDictionary()


def table_of(rows: LoraRows) -> Table:
    """The table of these rows, built at the first call."""
    table = _TABLES.get(rows)
    if table is None:
        table = _TABLES[rows] = Table(rows)
    return table


class Factor(ctypes.Structure):
    """Factor of products.h."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("segment", ctypes.c_void_p),
        ("ranks", ctypes.c_void_p),
        ("w", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("stack", ctypes.c_int64),
        ("part", ctypes.c_int64),
        ("n", ctypes.c_int64),
    )


@dataclass(frozen=True)
class NativeProducts:
    """`LoraProducts` in C. `segment` [rows] int64 is the segment of each row; rows of one expert lie side by side."""

    table: Table
    segment: Tensor

    @classmethod
    def dense(cls, rows: LoraRows) -> NativeProducts:
        """The batch's own rows, a segment for each group."""
        table = table_of(rows)
        return cls(table, table.segment)

    def experts(self, routing: Routing, rows: LoraRows) -> NativeProducts:
        """The pairs of `routing`, sorted by expert and so, within, by group."""
        segment_P = torch.add(self.table.segment[routing.token], routing.experts, alpha=len(rows.adapters))
        return NativeProducts(self.table, segment_P)

    @property
    def max_rank(self) -> int:
        return self.table.max_rank

    def room(self, like: Tensor, stack: int = 1) -> Tensor:
        return like.new_zeros(len(like), stack * self.max_rank, dtype=torch.float32)

    def shrink(self, x: Tensor, u: Tensor, name: str, *, part: int = 0, stack: int = 1, scaled: bool) -> None:
        """u[:, part] = x W^T of each row's group (and expert), for the tensor W called `name`."""
        if (native := _native(x, u)) is not None:
            factor = self._factor(self._weights(name), x.shape[1], part, stack, scaled)
            native.weft_add(ctypes.byref(factor), *rows_at(x), *rows_at(u), ctypes.c_int64(0), None, *_NOTHING)
            return
        for segment in self._segments(name, part, stack, scaled):
            torch.mul(x[segment.rows] @ segment.w.t(), segment.scale, out=u[segment.rows, segment.columns])

    def expand(self, y: Tensor, u: Tensor, name: str, *, part: int = 0, stack: int = 1, scaled: bool) -> None:
        """y += u[:, part] W in place."""
        if (native := _native(y, u)) is not None:
            factor = self._factor(self._weights(name), y.shape[1], part, stack, scaled)
            native.weft_add(None, *_NOTHING, *rows_at(u), ctypes.c_int64(1), ctypes.byref(factor), *rows_at(y))
            return
        for segment in self._segments(name, part, stack, scaled):
            y[segment.rows].addmm_(u[segment.rows, segment.columns], segment.w, alpha=segment.scale)

    def add(self, y: Tensor, x: Tensor | None, u: Tensor, a: str, parts: Parts, *, scaled: bool) -> None:
        """`shrink` x to u with the stacked `a`, unless x is None, and `expand` u to the columns of each of `parts`."""
        if (native := _native(y, u, *([x] if x is not None else []))) is not None and len(parts) <= PARTS:
            first: tuple[Any, ...] = (None, *_NOTHING)
            if x is not None:
                of_a = self._factor(self._weights(a), x.shape[1], 0, len(parts), False)
                first = (ctypes.byref(of_a), *rows_at(x))
            of_b = (Factor * len(parts))(
                *(self._factor(self._weights(name), n, part, 1, scaled) for part, (name, n) in enumerate(parts))
            )
            native.weft_add(*first, *rows_at(u), ctypes.c_int64(len(parts)), of_b, *rows_at(y))
            return
        if x is not None:
            self.shrink(x, u, a, stack=len(parts), scaled=False)
        for part, ((name, _), own) in enumerate(zip(parts, split(y, parts), strict=True)):
            self.expand(own, u, name, part=part, scaled=scaled)

    def outer(self, u: Tensor, y: Tensor, name: str, *, part: int = 0, stack: int = 1, scaled: bool) -> None:
        """Add u[:, part]^T y over each group's rows (of each expert) to the gradient of the tensor called `name`.
        Segments of one gradient add in their order."""
        if (native := _native(u, y)) is not None:
            factor = self._factor(self.table.addresses(name, grads=True), y.shape[1], part, stack, scaled)
            native.weft_outer(ctypes.byref(factor), *rows_at(u), *rows_at(y))
            return
        for segment in self._segments(name, part, stack, scaled, grads=True):
            segment.w.add_(torch.mm(u[segment.rows, segment.columns].t(), y[segment.rows]).mul_(segment.scale))

    def linear(self, a: str, n: int, parts: Parts) -> tuple[ctypes.Array[Factor], int]:
        """The matrices that `add` multiplies with, the stacked `a` [.., n] first; and how many numbers a row's x A^T
        takes."""
        key = (a, torch.get_num_threads())
        found = self.table.linears.get(key)
        if found is None:
            of_b = (self._factor(self._weights(name), m, part, 1, True) for part, (name, m) in enumerate(parts))
            found = (Factor * (1 + len(parts)))(self._factor(self._weights(a), n, 0, len(parts), False), *of_b)
            self.table.linears[key] = found
        return found, len(parts) * self.max_rank

    def factor(self, name: str, n: int, *, part: int = 0, stack: int = 1, scaled: bool = False) -> Factor:
        """The tensor `name` [.., n] of each adapter."""
        key = (name, torch.get_num_threads())
        if key not in self.table.factors:
            self.table.factors[key] = self._factor(self._weights(name), n, part, stack, scaled)
        return self.table.factors[key]

    def _weights(self, name: str) -> _Array:
        return self.table.addresses(name, grads=False)

    def _factor(self, w: _Array, n: int, part: int, stack: int, scaled: bool) -> Factor:
        table = self.table
        return Factor(
            len(self.segment),
            len(table.ranks_G),
            torch.get_num_threads(),
            self.segment.data_ptr(),
            table.ranks_G.address,
            w.address,
            table.scales_G.address if scaled else None,
            stack,
            part,
            n,
        )

    def _segments(self, name: str, part: int, stack: int, scaled: bool, *, grads: bool = False) -> Iterator[_Segment]:
        """Every segment by itself, for machines without a compiler."""
        table = self.table
        segments, counts = torch.unique_consecutive(self.segment, return_counts=True)
        for j, last, count in zip(segments.tolist(), counts.cumsum(0).tolist(), counts.tolist(), strict=True):
            expert, group = divmod(j, len(table.adapters))
            adapter, arena = table.adapters[group], (table.grads if grads else table.adapters)[group]
            if adapter is None or arena is None or name not in arena.stored:
                continue
            w = arena.stored[name]
            columns = slice(part * arena.rank, part * arena.rank + stack * arena.rank)
            scale = adapter.scale if scaled else 1.0
            yield _Segment(slice(last - count, last), columns, w[expert] if w.dim() == 3 else w, scale)


def _native(*tensors: Tensor) -> ctypes.CDLL | None:
    """The kernels, after a check that they can read these rows; None without a compiler."""
    for tensor in tensors:
        if tensor.dtype != torch.float32 or (len(tensor) and tensor.stride(1) != 1):
            raise ValueError(f"rows must be contiguous float32: {tensor.dtype}, strides {tensor.stride()}")
    return library()


def split(y: Tensor, parts: Parts) -> tuple[Tensor, ...]:
    """The columns of each part."""
    return y.split_with_sizes([n for _, n in parts], dim=1)


@dataclass(frozen=True)
class _Segment:
    rows: slice
    columns: slice
    w: Tensor
    scale: float
