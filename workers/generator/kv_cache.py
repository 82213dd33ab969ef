"""Keys and values of everything that is being generated, one slot per sequence; and attention over them.

The cache is static: [layers][slots, kv_heads, context, head_dim], allocated once (untouched pages cost nothing on CPU).
What lies beyond a sequence's length in its slot is left over from earlier tenants of the slot. It is masked, so it must
only be finite: 0 * nan would be nan. `clear` makes it so after a sequence that was not.

A row's attention must not depend on who shares the step, bit for bit. So the length it is computed over is its own,
rounded up to a multiple of `LENGTH_QUANTUM`, never the longest of the batch; rows of equal rounded length share a call.

Shapes: S slots, K kv heads, C context, D head dim, H query heads, R rows of a decode step, N rows of a call, B = N * K,
G = H / K queries that share a kv head, L length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

#: Attention lengths are rounded up to this many positions. Larger: fewer, bigger calls; smaller: less masked work.
LENGTH_QUANTUM = 64

#: Rows are read in place, as one span of slots, while the span is at most this many times the rows in it;
#: beyond that their keys and values are gathered first, which costs a copy.
MAX_SPAN_WASTE = 2


class KVCache:
    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        kv_heads: int,
        context: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (slots, kv_heads, context, head_dim)
        self.slots, self.context = slots, context
        self.k_SKCD = [zeros(shape, dtype, torch.device(device)) for _ in range(layers)]
        self.v_SKCD = [zeros(shape, dtype, torch.device(device)) for _ in range(layers)]

    @property
    def device(self) -> torch.device:
        return self.k_SKCD[0].device

    def write(self, layer: int, slot: int, start: int, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Store keys and values of consecutive tokens from position `start` of a slot."""
        for cache_SKCD, new_TKD in ((self.k_SKCD[layer], k_TKD), (self.v_SKCD[layer], v_TKD)):
            cache_SKCD[slot, :, start : start + new_TKD.shape[0]] = new_TKD.transpose(0, 1)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give `target` the first `length` positions of `source`."""
        for cache_SKCD in (*self.k_SKCD, *self.v_SKCD):
            cache_SKCD[target, :, :length] = cache_SKCD[source, :, :length]

    def clear(self, slot: int) -> None:
        for cache_SKCD in (*self.k_SKCD, *self.v_SKCD):
            cache_SKCD[slot].zero_()


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU as pages that the system provides when they are touched (torch.zeros touches them all)."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


@dataclass(frozen=True)
class _Bucket:
    """Rows that attend over the same rounded length."""

    rows_N: Tensor | None  # which rows of the step; None: all of them, in order
    span: slice | None  # their slots as a span of the cache to read in place ...
    picked_N: Tensor | None  # ... and which of the span's slots they are; None: all of them, in order
    slots_N: Tensor  # their slots, to gather where there is no span
    length: int
    bias_B1L: Tensor  # per row (of the span, where there is one) and kv head: 0 where it may look, -inf beyond


class DecodeAttend:
    """The `Attend` of one decode step: row i stores its new key and value at `positions[i]` of `slots[i]` and attends
    to every position up to it. Rows may come in any order; slots are distinct."""

    def __init__(self, cache: KVCache, slots: Sequence[int], positions: Sequence[int]) -> None:
        self._cache = cache
        self._slots_R = torch.tensor(slots, device=cache.device)
        self._positions_R = torch.tensor(positions, device=cache.device)
        groups: dict[int, list[int]] = {}
        for row, position in enumerate(positions):
            rounded = -(-(position + 1) // LENGTH_QUANTUM) * LENGTH_QUANTUM
            groups.setdefault(min(rounded, cache.context), []).append(row)
        self._buckets = [self._bucket(rows, length, slots, positions) for length, rows in groups.items()]

    def _bucket(self, rows: list[int], length: int, slots: Sequence[int], positions: Sequence[int]) -> _Bucket:
        device, kv_heads = self._cache.device, self._cache.k_SKCD[0].shape[1]
        own_slots = [slots[row] for row in rows]
        first, last = min(own_slots), max(own_slots)
        in_place = last - first + 1 <= MAX_SPAN_WASTE * len(rows)
        # A slot of the span that is not ours attends to position 0 and is thrown away.
        ends = [0] * (last - first + 1) if in_place else [positions[row] for row in rows]
        if in_place:
            for row in rows:
                ends[slots[row] - first] = positions[row]
        beyond_NL = torch.arange(length, device=device)[None] > torch.tensor(ends, device=device)[:, None]
        bias_NL = torch.zeros(beyond_NL.shape, dtype=self._cache.k_SKCD[0].dtype, device=device)
        whole_span = own_slots == list(range(first, last + 1))
        picked = [slot - first for slot in own_slots]
        return _Bucket(
            rows_N=None if rows == list(range(len(slots))) else torch.tensor(rows, device=device),
            span=slice(first, last + 1) if in_place else None,
            picked_N=None if whole_span else torch.tensor(picked, device=device),
            slots_N=torch.tensor(own_slots, device=device),
            length=length,
            bias_B1L=bias_NL.masked_fill_(beyond_NL, -torch.inf).repeat_interleave(kv_heads, dim=0)[:, None],
        )

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        cache = self._cache
        cache.k_SKCD[layer][self._slots_R, :, self._positions_R] = k_TKD
        cache.v_SKCD[layer][self._slots_R, :, self._positions_R] = v_TKD
        if len(self._buckets) == 1:
            return self._attend_bucket(self._buckets[0], layer, q_THD)
        out_THD = torch.empty_like(q_THD)
        for bucket in self._buckets:
            out_THD[bucket.rows_N] = self._attend_bucket(bucket, layer, q_THD)
        return out_THD

    def _attend_bucket(self, bucket: _Bucket, layer: int, q_THD: Tensor) -> Tensor:
        """Attention of one bucket's rows."""
        k_SKLD, v_SKLD = (cached[layer][:, :, : bucket.length] for cached in (self._cache.k_SKCD, self._cache.v_SKCD))
        q_NHD = q_THD if bucket.rows_N is None else q_THD[bucket.rows_N]
        heads, head_dim, kv_heads = q_NHD.shape[1], q_NHD.shape[2], k_SKLD.shape[1]
        if bucket.span is None:
            k_NKLD, v_NKLD = (tensor.index_select(0, bucket.slots_N) for tensor in (k_SKLD, v_SKLD))
        else:
            k_NKLD, v_NKLD = k_SKLD[bucket.span], v_SKLD[bucket.span]
            q_NHD = _spread(q_NHD, bucket.picked_N, k_NKLD.shape[0])
        q_NKGD = q_NHD.reshape(-1, kv_heads, heads // kv_heads, head_dim)
        out_NHD = _weighted_values(q_NKGD, k_NKLD, v_NKLD, bucket.bias_B1L).reshape(-1, heads, head_dim)
        return out_NHD if bucket.span is None or bucket.picked_N is None else out_NHD[bucket.picked_N]


def _weighted_values(q_NKGD: Tensor, k_NKLD: Tensor, v_NKLD: Tensor, bias_B1L: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D) + bias) v, [N, K, G, D].

    In float32 by plain batched products: scaled_dot_product_attention on several CPU threads rounds a row by the
    thread that it falls to. In shorter types it is used, for it keeps the scores in float32."""
    rows, kv_heads, queries, head_dim = q_NKGD.shape
    if q_NKGD.dtype != torch.float32:
        bias = bias_B1L.view(rows, kv_heads, 1, -1).expand(-1, -1, queries, -1)
        return F.scaled_dot_product_attention(q_NKGD, k_NKLD, v_NKLD, attn_mask=bias)
    k_BDL = k_NKLD.flatten(0, 1).transpose(1, 2)
    scores_BGL = torch.baddbmm(bias_B1L, q_NKGD.flatten(0, 1), k_BDL, alpha=head_dim**-0.5)
    return torch.bmm(torch.softmax(scores_BGL, dim=-1), v_NKLD.flatten(0, 1)).view_as(q_NKGD)


def _spread(q_NHD: Tensor, picked_N: Tensor | None, width: int) -> Tensor:
    """Put each row where its slot stands in the span."""
    if picked_N is None:
        return q_NHD
    spread = q_NHD.new_zeros((width, *q_NHD.shape[1:]))
    spread[picked_N] = q_NHD
    return spread
