"""The `Attend` of a decode step on a device, which reads the cache's pages in place (kernels.py). step.py makes it.

Shapes: G groups of layers, R rows, W pages of the longest row at most, H query heads, K kv heads, D head dim, S parts
of a row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from triton import next_power_of_2

from workers.generator.cache.kv_cache import PAGE_TOKENS, KVCache
from workers.generator.gpu import kernels
from workers.model.attend import ALL, Reach

#: The most parts that a row's pages are cut into, and the fewest pages of a part. If rows are few, parts keep a device
#: busy; more parts cost memory and a longer `combine`.
MAX_SPLITS = 32
MIN_PAGES = 4

#: The least number of rows that tensor cores take.
_MIN_ROWS = 16


class PagedAttend:
    """Row i stores its new key and value at `positions_R[i]` of the sequence whose pages are `table_GRW[g, i]` in
    layers of group g, and attends to every position up to it. Launches read both tensors on the device each time they
    run, so a captured launch serves other rows after the tensors were rewritten."""

    latent = True

    def __init__(self, cache: KVCache, table_GRW: Tensor, positions_R: Tensor) -> None:
        """`table_GRW` int32, `positions_R` int64, contiguous, on the device of the cache."""
        self._cache, self._table_GRW, self._positions_R = cache, table_GRW, positions_R
        self._splits = min(MAX_SPLITS, -(-table_GRW.shape[2] // MIN_PAGES))

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, reach: Reach = ALL) -> Tensor:
        (rows, heads, dim), kv_heads, splits = q_THD.shape, k_TKD.shape[1], self._splits
        k_NKDP, v_NKPD = self._cache.k_NKDP[layer], self._cache.v_NKPD[layer]
        where = (self._table_GRW[self._cache.group_of[layer]], self._positions_R, self._table_GRW.shape[2])
        block = max(_MIN_ROWS, next_power_of_2(dim))
        q, k, v = (tensor.flatten(1) for tensor in (q_THD, k_TKD, v_TKD))
        kernels.store[(rows, kv_heads)](
            k,
            k.stride(0),
            v,
            v.stride(0),
            k_NKDP,
            v_NKPD,
            *where,
            HEADS=kv_heads,
            DIM=dim,
            PAGE=PAGE_TOKENS,
            BLOCK_D=block,
        )
        parts = q.new_empty(rows, heads, splits, dim, dtype=torch.float32)
        tops, masses = (q.new_empty(rows, heads, splits, dtype=torch.float32) for _ in range(2))
        kernels.partial[(rows, kv_heads, splits)](
            q,
            q.stride(0),
            k_NKDP,
            v_NKPD,
            *where,
            dim**-0.5 * math.log2(math.e),
            parts,
            tops,
            masses,
            HEADS=kv_heads,
            GROUPS=heads // kv_heads,
            DIM=dim,
            PAGE=PAGE_TOKENS,
            SPLITS=splits,
            MIN_PAGES=MIN_PAGES,
            WINDOW=reach.window,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            BLOCK_G=max(_MIN_ROWS, next_power_of_2(heads // kv_heads)),
            BLOCK_D=block,
        )
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        kernels.combine[(rows, heads)](
            parts,
            tops,
            masses,
            self._positions_R,
            q if reach.sinks_H is None else reach.sinks_H,
            out_THD,
            ALL_HEADS=heads,
            DIM=dim,
            PAGE=PAGE_TOKENS,
            SPLITS=splits,
            MIN_PAGES=MIN_PAGES,
            WINDOW=reach.window,
            SINKS=reach.sinks_H is not None,
            BLOCK_D=block,
        )
        return out_THD
