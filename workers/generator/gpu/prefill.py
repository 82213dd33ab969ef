"""The `Attend` of a prefill on a device: for each layer one launch stores the new keys and values of all prompts, and
one attends over the pages, those just written and cached prefixes alike (prefill_kernels.py).

Which program computes which tokens is decided on the host, once for all layers, and sent in one copy from pinned
memory, so that nothing waits for the device.

Shapes: T packed tokens, H query heads, K kv heads, D head dim, B blocks (of a page) or tiles of a launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from triton import next_power_of_2

from workers.generator.attention.prefill_attend import Piece
from workers.generator.cache.kv_cache import PAGE_TOKENS, KVCache
from workers.generator.gpu import prefill_kernels as kernels
from workers.model.attend import ALL, Reach
from workers.model.device import sent
from workers.model.recur import Recur, Recurrence

#: The largest tile (rows x columns) whose sums fit into registers: for 16-bit tensors, and for float32, which tensor
#: cores do not multiply exactly. A tile has a row for each token and query that share a kv head, and a column for each
#: number of the head.
SUMS, SUMS_FLOAT32 = 128 * 128, 32 * 128
MAX_ROWS = 128
#: The fewest rows and columns that tensor cores take.
_MIN_ROWS = _MIN_COLUMNS = 16

#: Each table begins at a multiple of this many 4-byte numbers: kernels are compiled for the alignment of their
#: arguments.
_ALIGNED = 4

Ints = npt.NDArray[np.int32]


class Shape(NamedTuple):
    """How a tile is computed: by `warps` that share its rows, with `stages` pages being fetched at a time."""

    rows: int
    columns: int
    warps: int
    stages: int

    @classmethod
    def of(cls, dim: int, groups: int, itemsize: int) -> Shape:
        """The shape for heads of `dim` numbers, `groups` queries that share a kv head, and numbers of `itemsize`
        bytes."""
        columns, precise = max(_MIN_COLUMNS, next_power_of_2(dim)), itemsize == 4
        rows = max(_MIN_ROWS, next_power_of_2(groups), min(MAX_ROWS, (SUMS_FLOAT32 if precise else SUMS) // columns))
        return cls(rows, columns, 8 if precise or rows * columns >= SUMS else 4, 2 if precise else 3)


class _Group(NamedTuple):
    """The tables for a group of layers, int32, flattened; prefill_kernels.py states their rows."""

    blocks_B3: Tensor
    tiles_B5: Tensor
    pages: Tensor


class PagedPrefill:
    """The `Attend` of one prefill; on the CPU it is `PrefillAttend`. The pieces of prompts follow each other in T.
    `heads`: query heads. `recur` serves recurrent layers."""

    latent = True

    def __init__(self, cache: KVCache, pieces: Sequence[Piece], heads: int, recur: Recur | None = None) -> None:
        self._cache, self._recur = cache, recur
        each = heads // cache.kv_heads
        pool = cache.k_NKDP[0]
        self._shape = Shape.of(pool.shape[2], each, pool.element_size())
        laid = [_laid_out(pieces, group, self._shape.rows // next_power_of_2(each)) for group in range(cache.groups)]
        parts = [np.pad(part, (0, -part.size % _ALIGNED)) for group in laid for part in group]
        sizes = [part.size for part in parts]
        taken = iter(sent(torch.from_numpy(np.concatenate(parts)), cache.device).split_with_sizes(sizes))
        self._groups = [_Group(*(next(taken)[: part.size] for part in group)) for group in laid]

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, reach: Reach = ALL) -> Tensor:
        (_, heads, dim), kv_heads, shape = q_THD.shape, k_TKD.shape[1], self._shape
        group = self._groups[self._cache.group_of[layer]]
        pools = self._cache.k_NKDP[layer], self._cache.v_NKPD[layer]
        q, k, v = (tensor.flatten(1) for tensor in (q_THD, k_TKD, v_TKD))
        fixed = {"HEADS": kv_heads, "DIM": dim, "PAGE": PAGE_TOKENS, "BLOCK_D": shape.columns}
        kernels.store_blocks[(len(group.blocks_B3) // 3, kv_heads)](
            k, k.stride(0), v, v.stride(0), *pools, group.blocks_B3, **fixed
        )
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        kernels.attend_tiles[(len(group.tiles_B5) // 5, kv_heads)](
            q,
            q.stride(0),
            *pools,
            group.tiles_B5,
            group.pages,
            q if reach.sinks_H is None else reach.sinks_H,
            dim**-0.5 * math.log2(math.e),
            out_THD,
            GROUPS=heads // kv_heads,
            WINDOW=reach.window,
            SINKS=reach.sinks_H is not None,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            BLOCK_M=shape.rows,
            num_warps=shape.warps,
            num_stages=shape.stages,
            **fixed,
        )
        return out_THD

    def recur(self, layer: int, recurrence: Recurrence, x_TI: Tensor, *, apart: bool) -> Tensor:
        assert self._recur is not None
        return self._recur.recur(layer, recurrence, x_TI, apart=apart)


def _laid_out(pieces: Sequence[Piece], group: int, tile: int) -> tuple[Ints, Ints, Ints]:
    """The blocks, the tiles of `tile` positions, and the pages for a group of layers. Tiles that attend to most
    positions come first: one that began last would delay the end of the launch."""
    blocks: list[tuple[int, int, int]] = []
    tiles: list[tuple[int, int, int, int, int]] = []
    pages: list[int] = []
    row = 0
    for piece in pieces:
        held, table = piece.pages[group], len(pages) - piece.pages[group].gone
        pages += held.pages
        first = row - piece.start  # of position 0
        blocks += [(first + a, b - a, held.of(a)) for a, b in piece.blocks()]
        for at in range(piece.start // tile * tile, piece.stop, tile):
            tiles.append((first + at, max(0, piece.start - at), min(tile, piece.stop - at), at, table))
        row += piece.stop - piece.start
    tiles.sort(key=lambda own: -own[3])
    return np.array(blocks, np.int32).ravel(), np.array(tiles, np.int32).ravel(), np.array(pages, np.int32)
