"""Launches of the low-rank kernels (kernels.py): `TritonProducts`, the `LoraProducts` of prompts and of the trainer on
a device.

One launch serves all groups of a rank class that have the tensor. Block shapes follow from the rank class and the
widths alone, so a group's bits do not depend on its neighbours. `u` is [rows, stack * max_rank] float32; a group uses
the first stack * rank columns of its rows, part beside part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from workers.model.gpu import kernels
from workers.model.gpu.segments import EXPERT_ROWS, Blocks, RankClass, Segments, Table, table_of
from workers.model.lora.rows import LoraRows
from workers.model.native.launch import Parts, split
from workers.model.routing import Routing

#: The most columns of the long side that one block of `shrink` adds up. Otherwise a vocabulary of 150,000 columns would
#: be the work of a single block for each few rows.
MAX_SPLIT = 4096

#: How many sums of a block (ranks x columns) four warps keep in registers (tests/workers/model/test_gpu_compile.py).
SUMS = 4096


class Tile(NamedTuple):
    """How many columns of the long side a block computes at a time, and with how many warps."""

    columns: int
    warps: int

    def beside(self, rank_block: int) -> Tile:
        """The tile for ranks in blocks of this size: fewer columns if the sums would not fit into registers."""
        columns = SUMS // rank_block
        return self if rank_block <= 32 and columns >= self.columns else Tile(min(columns, self.columns), 4)

    @property
    def fixed(self) -> dict[str, int]:
        """The constants that are compiled into a kernel."""
        return {"BLOCK_N": self.columns, "num_warps": self.warps}


#: The tile of each kernel; OUTER_EXPERTS is that of `outer` over (expert, group) segments. None tried was faster on an
#: H100, for 64 adapters of rank 8 on a 30B model (bench/gpu_tiles.py).
SHRINK, EXPAND, OUTER, OUTER_EXPERTS = Tile(128, 4), Tile(128, 2), Tile(128, 4), Tile(256, 2)

#: The largest block of ranks whose u stays in registers while columns pass.
HELD = 32

#: Columns of a block of `outer` if wider ones would be fewer than FEW_BLOCKS, too few to keep a device busy.
NARROW, FEW_BLOCKS = 32, 256


class Precision(NamedTuple):
    """How tensor cores multiply float32: "tf32" keeps 10 bits of each mantissa (bfloat16 has 7), "ieee" all 23."""

    name: str

    @classmethod
    def beside(cls, weights: torch.dtype) -> Precision:
        """The precision for adapters beside a base of this dtype."""
        return cls("ieee" if weights == torch.float32 else "tf32")


@dataclass(frozen=True)
class TritonProducts:
    """`LoraProducts` in Triton: over the rows of the batch itself, or over (token, expert) pairs sorted into
    segments."""

    table: Table
    segments: Segments
    blocks: Sequence[tuple[RankClass, Blocks]]
    precision: Precision

    @classmethod
    def dense(cls, rows: LoraRows, name: str, base: torch.dtype) -> TritonProducts:
        """Over the batch's own rows, for the groups that have the tensor called `name`, beside a base of this dtype."""
        table = table_of(rows)
        return cls(table, table.segments, table.blocks(name), Precision.beside(base))

    def experts(self, routing: Routing, rows: LoraRows) -> TritonProducts:
        """Over the pairs of `routing`. They are sorted by expert, and the sort is stable, so each expert's are in the
        order of groups."""
        groups, device = len(rows.adapters), routing.experts.device
        segment_P = routing.experts * groups + rows.group_of_row(device)[routing.token]
        start = torch.searchsorted(segment_P, torch.arange(routing.num_experts * groups + 1, device=device))
        segments = Segments(start, groups, routing.num_experts, len(routing.order), EXPERT_ROWS)
        return replace(
            self, segments=segments, blocks=[(each, segments.blocks(each.active_G)) for each, _ in self.blocks]
        )

    @property
    def max_rank(self) -> int:
        return self.table.max_rank

    def room(self, like: Tensor, stack: int = 1) -> Tensor:
        """A new u, of zeros: `shrink` leaves columns beyond a group's ranks unwritten."""
        return like.new_zeros(len(like), stack * self.max_rank, dtype=torch.float32)

    def shrink(self, x: Tensor, u: Tensor, name: str, *, part: int = 0, stack: int = 1, scaled: bool) -> None:
        """u[:, part] = x W^T. Sums over more than MAX_SPLIT columns are split at its multiples, and the splits added
        up."""
        _check(x, u)
        wide, table = x.shape[1], self.table
        splits = -(-wide // MAX_SPLIT)
        found = u[None] if splits == 1 else u.new_zeros(splits, *u.shape)
        for each, blocks in self.blocks:
            if len(x):
                tile = SHRINK.beside(each.block_of(stack))
                # The fewest whole steps that cover `wide`; the length is compiled into the kernel.
                short = -(-wide // tile.columns) * tile.columns
                grid = (len(blocks.segment), each.rank_blocks(stack), splits)
                kernels.shrink[grid](
                    x,
                    x.stride(0),
                    found,
                    found.stride(1),
                    found.stride(0),
                    table.weights(name),
                    *where(table, blocks, self.segments),
                    wide,
                    part,
                    STACK=stack,
                    SCALED=scaled,
                    PRECISION=self.precision.name,
                    BLOCK_M=blocks.block_rows,
                    BLOCK_R=each.block_of(stack),
                    BLOCK_K=tile.columns,
                    SPLIT=min(MAX_SPLIT, short),
                    num_warps=tile.warps,
                )
        if splits > 1:
            u += found.sum(0)

    def expand(self, y: Tensor, u: Tensor, name: str, *, part: int = 0, stack: int = 1, scaled: bool) -> None:
        """y += u[:, part] W."""
        _check(y, u)
        wide, table = y.shape[1], self.table
        for each, blocks in self.blocks:
            if len(y):
                tile = EXPAND.beside(each.block)
                grid = (len(blocks.segment), -(-wide // tile.columns))
                kernels.expand[grid](
                    y,
                    y.stride(0),
                    u,
                    u.stride(0),
                    table.weights(name),
                    *where(table, blocks, self.segments),
                    wide,
                    part,
                    STACK=stack,
                    SCALED=scaled,
                    PRECISION=self.precision.name,
                    BLOCK_M=blocks.block_rows,
                    BLOCK_R=each.block,
                    **tile.fixed,
                )

    def add(self, y: Tensor, x: Tensor | None, u: Tensor, a: str, parts: Parts, *, scaled: bool) -> None:
        """`shrink` for all parts at once, then `expand` part by part."""
        if x is not None:
            self.shrink(x, u, a, stack=len(parts), scaled=False)
        for part, ((name, _), own) in enumerate(zip(parts, split(y, parts), strict=True)):
            self.expand(own, u, name, part=part, scaled=scaled)

    def outer(self, u: Tensor, y: Tensor, name: str, *, part: int = 0, stack: int = 1, scaled: bool) -> None:
        """Add u[:, part]^T y to the gradients; one block adds up all rows of its groups."""
        _check(y, u)
        wide, table = y.shape[1], self.table
        for each, blocks in self.blocks:
            owners = each.owners
            if len(y) and owners.count:
                form, columns = self._outer_form(each, stack, wide)
                grid = (owners.count * self.segments.num_experts, columns, each.rank_blocks(stack))
                kernels.outer[grid](
                    u,
                    u.stride(0),
                    y,
                    y.stride(0),
                    table.grads(name),
                    table.ranks_G,
                    table.scales_G,
                    owners.start,
                    owners.groups,
                    self.segments.start,
                    owners.count,
                    self.segments.num_groups,
                    wide,
                    part,
                    STACK=stack,
                    SCALED=scaled,
                    PRECISION=self.precision.name,
                    BLOCK_M=blocks.block_rows,
                    BLOCK_R=each.block_of(stack),
                    **form,
                )

    def _outer_form(self, each: RankClass, stack: int, wide: int) -> tuple[dict[str, int], int]:
        """The constants that are compiled into `outer`, and the number of its blocks of columns."""
        if self.segments.block_rows == EXPERT_ROWS:  # few rows: nothing to fetch ahead
            tile, stages = OUTER_EXPERTS.beside(each.block_of(stack)), 1
        else:
            tile, stages = OUTER.beside(each.block_of(stack)), 3
            if each.owners.count * -(-wide // tile.columns) < FEW_BLOCKS:
                tile = Tile(NARROW, tile.warps)
        return {"STAGES": stages} | tile.fixed, -(-wide // tile.columns)


def where(table: Table, blocks: Blocks, segments: Segments) -> tuple[Tensor | int, ...]:
    """The kernels' arguments from `ranks` to `num_groups`."""
    num_segments = segments.num_experts * segments.num_groups
    return (
        table.ranks_G,
        table.scales_G,
        blocks.segment,
        blocks.first,
        segments.start,
        num_segments,
        segments.num_groups,
    )


def _check(x: Tensor, u: Tensor) -> None:
    """Check the kernels' assumption that the elements of a row are neighbours in memory, and that u is float32."""
    if x.stride(1) != 1 or u.stride(1) != 1 or u.dtype != torch.float32:
        raise ValueError(f"rows must be contiguous and u float32: strides {x.stride()}, {u.stride()}, {u.dtype}")
