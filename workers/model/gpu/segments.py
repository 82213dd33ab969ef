"""Tables on the device that tell the kernels where rows, factors and gradients are; built once per batch, or once per
layer for experts.

Nothing here waits for the device: the host does not know how many rows an expert has, so block maps have as many blocks
as there could be, and surplus blocks do nothing.

Shapes: G groups of the batch, E experts, R = E * G segments, P rows, N names of adapter tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.model.adapters.adapter import Adapter
from workers.model.adapters.shape import AdapterShape
from workers.model.device import sent
from workers.model.lora.rows import LoraRows

#: Rows of a block: in dense products, whose groups have many rows, and in the short (expert, group) segments.
DENSE_ROWS = 32
EXPERT_ROWS = 16

#: Ranks are computed in blocks of 16 (the least that tensor cores take), 32, 64 or 128, depending on the group's own
#: rank alone.
MIN_RANK_BLOCK = 16
MAX_RANK_BLOCK = 128
#: The least block for the ranks of stacked factors.
STACKED = 32


class Blocks(NamedTuple):
    """Rows cut into blocks of `block_rows`, none across two segments. `segment` int64 [blocks]: the segment of each
    block, R for a surplus block. `first` int64 [R + 1]: how many blocks come before each segment."""

    block_rows: int
    segment: Tensor
    first: Tensor


@dataclass(frozen=True)
class Segments:
    """Rows start[i]:start[i + 1] belong to segment i = expert * num_groups + group. `rows`: how many rows there are in
    all."""

    start: Tensor  # int64 [R + 1]
    num_groups: int
    num_experts: int
    rows: int
    block_rows: int

    def blocks(self, active_G: Tensor) -> Blocks:
        """The blocks of the groups that are true in `active_G`."""
        size = self.block_rows
        counts_EG = self.start.diff().view(self.num_experts, self.num_groups)
        needed_R = (torch.div(counts_EG + size - 1, size, rounding_mode="floor") * active_G).flatten()
        first = torch.nn.functional.pad(needed_R.cumsum(0), (1, 0))
        segments = min(self.num_experts * self.num_groups, self.rows)
        most = max(1, self.rows // size + segments)
        numbers = torch.arange(most, device=self.start.device)
        return Blocks(size, torch.searchsorted(first[1:].contiguous(), numbers, right=True), first)


@dataclass(frozen=True)
class Owners:
    """The `count` gradient arenas of a batch: the groups `groups[start[o]:start[o + 1]]` add to arena o, in that order.
    Both int64 on the device."""

    count: int
    start: Tensor
    groups: Tensor


@dataclass(frozen=True)
class RankClass:
    """The groups whose ranks are computed in blocks of `block`; `most` is the largest of their ranks. A launch serves
    one class, so that how a group is computed depends on its own rank alone. `owners`: the arenas of the groups that
    are trained."""

    block: int
    most: int
    active_G: Tensor  # bool
    owners: Owners

    def block_of(self, stack: int) -> int:
        """The size of a block of ranks for `stack` factors; as a rule all of them fit, so that rows are read once."""
        return self.block if stack == 1 else max(self.block, STACKED)

    def rank_blocks(self, stack: int) -> int:
        """How many blocks `stack` factors of the largest rank take."""
        return -(-stack * self.most // self.block_of(stack))


class Table:
    """The adapters of one batch, as addresses on the device. `table_of` makes one for each LoraRows and keeps it as
    long as these."""

    def __init__(self, rows: LoraRows, device: torch.device, *, single: bool = False) -> None:
        #: True if each row is a group of its own, as in a decode step (single.py).
        self.single = single
        # Not the rows themselves: they are the weak key of this table.
        self._adapters, self._grads, self._device = rows.adapters, rows.grads, device
        ranks = [0 if adapter is None else adapter.rank for adapter in rows.adapters]
        #: The largest rank, rounded up so that rows of x A^T begin at whole vectors.
        self.max_rank = -(-max(ranks, default=0) // MIN_RANK_BLOCK) * MIN_RANK_BLOCK
        self.ranks_G = sent(torch.tensor(ranks), device)
        scales = [0.0 if adapter is None else adapter.scale for adapter in rows.adapters]
        self.scales_G = sent(torch.tensor(scales), device)
        starts = sent(torch.tensor(rows.offsets), device)
        self.segments = Segments(starts, len(ranks), 1, len(rows), DENSE_ROWS)
        self._index, self._weights_NG, self._has_NG = _addresses(rows.adapters)
        self._grad_index, grads_NG, _ = _addresses(rows.grads)
        self._device_weights_NG = sent(torch.from_numpy(self._weights_NG), device)
        self._device_grads_NG = sent(torch.from_numpy(grads_NG), device)
        self._classes: dict[bytes, list[tuple[RankClass, Blocks]]] = {}

    def rewrite(self, rows: LoraRows) -> None:
        """For a table of single rows: put other rows into the present tensors, so that launches captured with these
        serve the other rows. They must have the same offsets and adapters of the same `forms`, and none may be
        trained."""
        other = Table(rows, self._device)
        names_N = [other._index[name] for name in self._index]
        pairs = [(self.ranks_G, other.ranks_G), (self.scales_G, other.scales_G)]
        pairs += [(self._device_weights_NG, sent(torch.from_numpy(other._weights_NG[names_N]), self._device))]
        for tensor, new_tensor in pairs:
            tensor.copy_(new_tensor)

    @property
    def addresses(self) -> Tensor:
        """int64 [N, G]: the address of each group's tensors; 0 if there is none."""
        return self._device_weights_NG

    def index(self, name: str) -> int:
        """The row of `addresses` for this tensor."""
        return self._index[name]

    def weights(self, name: str) -> Tensor:
        """int64 [G]: the address of each group's tensor; 0 if there is none."""
        return self._device_weights_NG[self._index[name]]

    def grads(self, name: str) -> Tensor:
        """int64 [G]: the address of each group's gradient; 0 if there is none."""
        return self._device_grads_NG[self._grad_index[name]]

    def blocks(self, name: str) -> list[tuple[RankClass, Blocks]]:
        """The rank classes of the groups that have this tensor, with the blocks of their rows in the batch. Cached by
        set of groups; there are few such sets: those with attention, with MLP, with unembedding."""
        has_G = self._has_NG[self._index[name]]
        found = self._classes.get(key := has_G.tobytes())
        if found is None:
            classes = self._classes_of(has_G.tolist())
            found = self._classes[key] = [(each, self.segments.blocks(each.active_G)) for each in classes]
        return found

    def all_have(self, name: str) -> bool:
        """True if the adapter of every group has this tensor."""
        return bool(self._has_NG[self._index[name]].all())

    def _classes_of(self, has: Sequence[bool]) -> list[RankClass]:
        blocks: dict[int, list[int]] = {}
        for group, adapter in enumerate(self._adapters):
            if has[group] and adapter is not None:
                blocks.setdefault(rank_block(adapter.rank), []).append(group)
        return [self._class(block, groups) for block, groups in sorted(blocks.items())]

    def _class(self, block: int, groups: list[int]) -> RankClass:
        among = set(groups)
        active = torch.tensor([group in among for group in range(len(self._adapters))])
        arenas: dict[int, list[int]] = {}
        for group in groups:
            grad = self._grads[group]
            if grad is not None:
                arenas.setdefault(grad.flat.data_ptr(), []).append(group)
        start = torch.tensor([0, *accumulate(map(len, arenas.values()))])
        flat = torch.tensor([group for members in arenas.values() for group in members], dtype=torch.int64)
        owners = Owners(len(arenas), sent(start, self._device), sent(flat, self._device))
        most = max(adapter.rank for adapter in (self._adapters[group] for group in groups) if adapter is not None)
        return RankClass(block, most, sent(active, self._device), owners)


_TABLES: WeakKeyDictionary[LoraRows, Table] = WeakKeyDictionary()


def table_of(rows: LoraRows) -> Table:
    """The table of these rows, built at the first call on the device of their adapters."""
    table = _TABLES.get(rows)
    if table is None:
        device = next(adapter.flat.device for adapter in rows.adapters if adapter is not None)
        table = _TABLES[rows] = Table(rows, device)
    return table


def rewritable(shapes: Collection[AdapterShape], num_rows: int, device: torch.device) -> tuple[LoraRows, Table]:
    """Rows that are a group each, and their table, to be rewritten with adapters of exactly these `forms`. Until then
    the adapters have shapes but no memory."""
    ghosts: list[Adapter | None] = [Adapter.zeros(shape, device="meta") for shape in shapes]
    rows = LoraRows(range(num_rows + 1), ghosts + [None] * (num_rows - len(ghosts)))
    table = _TABLES[rows] = Table(rows, device, single=True)
    return rows, table


def forms(adapters: Collection[Adapter | None]) -> frozenset[AdapterShape]:
    """The shapes of a batch's adapters, with ranks rounded up to whole blocks: they decide which launches the batch
    takes."""
    shapes = {adapter.shape for adapter in adapters if adapter is not None}
    return frozenset(replace(shape, rank=_full(shape.rank)) for shape in shapes)


def _full(rank: int) -> int:
    """A rank rounded up to whole blocks."""
    block = rank_block(rank)
    return -(-rank // block) * block


def rank_block(rank: int) -> int:
    """The block size for a rank: the smallest that holds it; ranks beyond the largest block take several."""
    return min(MAX_RANK_BLOCK, max(MIN_RANK_BLOCK, 1 << (rank - 1).bit_length()))


def _addresses(adapters: Sequence[Adapter | None]) -> tuple[Mapping[str, int], NDArray[np.int64], NDArray[np.bool_]]:
    """The number of each tensor by name; the address of each tensor in each arena, int64 [N, G], 0 if the arena lacks
    it; and whether the arena has it, bool [N, G]."""
    index, offsets = _layout(tuple(dict.fromkeys(adapter.shape for adapter in adapters if adapter is not None)))
    missing = np.full(len(index), -1)
    at_NG = np.stack([missing if adapter is None else offsets[adapter.shape] for adapter in adapters], axis=1)
    first_G = np.array([0 if adapter is None else adapter.flat.data_ptr() for adapter in adapters])
    return index, np.where(at_NG >= 0, at_NG + first_G, 0), at_NG >= 0


@lru_cache(maxsize=64)
def _layout(shapes: tuple[AdapterShape, ...]) -> tuple[Mapping[str, int], dict[AdapterShape, NDArray[np.int64]]]:
    """For arenas of these shapes: the number of each tensor, and the offset in bytes of each in each shape; -1 if the
    shape lacks it."""
    names = dict.fromkeys(name for shape in shapes for name in shape.slots)
    offsets = {
        shape: np.array([4 * shape.slots[name].offset if name in shape.slots else -1 for name in names])
        for shape in shapes
    }
    return {name: n for n, name in enumerate(names)}, offsets
