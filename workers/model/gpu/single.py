"""The low-rank products of a decode step, in which every row is a group of its own: `SingleProducts`, a `LoraProducts`.

A row's cost is to read its factors once, so nothing is tiled over rows and tensor cores are not used: a program
multiplies one row with a piece of one factor, found by address, in float32. One launch serves all ranks and up to PARTS
factors side by side. No launch is needed to find rows: a row's group is its number, a pair's group that of its token.

Invariant (isolation): a row's bits depend on the row and its adapter alone. Pieces follow from the base's widths, and
sums over the rank add RANKS numbers at a time. Decode steps always use these products, and nothing else does
(`rewritable` in segments.py), so the kernel that computes a group never depends on the other groups' sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from workers.model.gpu import single_kernels
from workers.model.gpu.segments import Table
from workers.model.lora.rows import LoraRows
from workers.model.native.launch import Parts
from workers.model.routing import Routing

#: The most factors that one launch of `expand_row` takes.
PARTS = 4

#: Rows of a factor that `expand_row` adds up at a time.
RANKS = 8


class Piece(NamedTuple):
    """How much of a factor a program multiplies at a time, [ranks, columns], and with how many warps."""

    ranks: int
    columns: int
    warps: int


#: The pieces of `shrink_row` for factors wider than SHRINK.columns and for others, and of `expand_row`. None tried was
#: faster on an H100, for 64 rows of a 30B model (bench/gpu_tiles.py).
SHRINK_WIDE, SHRINK, EXPAND = Piece(1, 2048, 4), Piece(8, 1024, 4), Piece(RANKS, 128, 1)


def shrink_piece(wide: int) -> Piece:
    """The piece of `shrink_row`: whole ranks, since a program sums over the full width."""
    if wide > SHRINK.columns:
        return SHRINK_WIDE
    return SHRINK._replace(columns=min(SHRINK.columns, max(16, triton.next_power_of_2(wide))))


def expand_piece(wide: int) -> Piece:
    """The piece of `expand_row`, whose widest part has this width."""
    return EXPAND._replace(columns=min(EXPAND.columns, max(16, triton.next_power_of_2(wide))))


@dataclass(frozen=True)
class SingleProducts:
    """`LoraProducts` for rows that are a group each; or, with `token` and `expert` int64 [P], for the (token, expert)
    pairs of such rows."""

    table: Table
    token: Tensor | None = None
    expert: Tensor | None = None

    def experts(self, routing: Routing, rows: LoraRows) -> SingleProducts:
        return replace(self, token=routing.token, expert=routing.experts)

    @property
    def max_rank(self) -> int:
        return self.table.max_rank

    def room(self, like: Tensor, stack: int = 1) -> Tensor:
        """A new u, uninitialised: `shrink` writes and `expand` reads only the columns of a row's own rank."""
        return like.new_empty(len(like), stack * self.max_rank, dtype=torch.float32)

    def shrink(self, x: Tensor, u: Tensor, name: str, *, part: int = 0, stack: int = 1, scaled: bool) -> None:
        """u[:, part] = x W^T."""
        wide, table = x.shape[1], self.table
        piece = shrink_piece(wide)
        single_kernels.shrink_row[len(x), -(-stack * self.max_rank // piece.ranks)](
            x,
            x.stride(0),
            u,
            u.stride(0),
            table.addresses,
            table.index(name),
            *self._where(u),
            wide,
            part,
            PAIRED=self.token is not None,
            STACK=stack,
            SCALED=scaled,
            BLOCK_R=piece.ranks,
            BLOCK_K=piece.columns,
            num_warps=piece.warps,
        )

    def expand(self, y: Tensor, u: Tensor, name: str, *, part: int = 0, stack: int = 1, scaled: bool) -> None:
        """y += u[:, part] W."""
        self._expand(y, u, [(name, y.shape[1])], part=part, stack=stack, scaled=scaled)

    def add(self, y: Tensor, x: Tensor | None, u: Tensor, a: str, parts: Parts, *, scaled: bool) -> None:
        """`shrink` for all parts at once, then `expand` for up to PARTS in one launch."""
        if x is not None:
            self.shrink(x, u, a, stack=len(parts), scaled=False)
        column = 0
        for part in range(0, len(parts), PARTS):
            taken = parts[part : part + PARTS]
            self._expand(y[:, column:], u, taken, part=part, scaled=scaled)
            column += sum(wide for _, wide in taken)

    def outer(self, u: Tensor, y: Tensor, name: str, *, part: int = 0, stack: int = 1, scaled: bool) -> None:
        raise NotImplementedError("decode steps train nothing")

    def _expand(self, y: Tensor, u: Tensor, parts: Parts, *, part: int, stack: int = 1, scaled: bool) -> None:
        widest, table = max(wide for _, wide in parts), self.table
        piece, last = expand_piece(widest), [parts[-1]] * (PARTS - len(parts))
        every = [*parts, *last]
        single_kernels.expand_row[len(y), -(-widest // piece.columns), len(parts)](
            y,
            y.stride(0),
            u,
            u.stride(0),
            table.addresses,
            *(table.index(name) for name, _ in every),
            *(wide for _, wide in every),
            *self._where(u),
            part,
            PAIRED=self.token is not None,
            STACK=stack,
            SCALED=scaled,
            BLOCK_R=piece.ranks,
            BLOCK_N=piece.columns,
            num_warps=piece.warps,
        )

    def _where(self, u: Tensor) -> tuple[Tensor | int, ...]:
        """The kernels' arguments from `ranks` to `num_groups`. Without pairs, a tensor that is not read stands in for
        `token` and `expert`."""
        token = self.token if self.token is not None else self.table.ranks_G
        expert = self.expert if self.expert is not None else self.table.ranks_G
        return self.table.ranks_G, self.table.scales_G, token, expert, len(self.table.ranks_G)
