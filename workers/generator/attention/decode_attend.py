"""Attention of a decode step: one new token for each of many sequences, each over its own pages.

A row's attention must not depend on the other rows of the step, bit for bit. In float32 on the CPU a kernel in C
(attend.c) reads every row's pages in place and adds in an order that follows from the row's length. Elsewhere, and
without a C compiler, pages are gathered first, and rows whose lengths round up to the same multiple of `LENGTH_QUANTUM`
share a product, so that its shape per row follows from the row's own length, too (but on a CPU each row that attends to
latents has a product of its own: with all heads in it, it is so large that threads part it by its rows). On a CUDA
device the engine attends by gpu/attend.py. By attend.c the tokens of prompts attend in the same way (`of_prompts`).

Shapes: R rows, W pages of the longest row at most, H query heads, K kv heads, D head dim, N rows of a call, B = N * K,
G = H / K queries that share a kv head (of tables: groups of layers), L length.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from workers.generator.attention.prefill_attend import Piece, softmax_beside
from workers.generator.cache.kv_cache import PAGE_TOKENS, KVCache, pages_of
from workers.model.attend import ALL, Reach
from workers.model.native.build import library
from workers.model.recur import Recur, Recurrence

#: Attention lengths are rounded up to this many positions. Larger: fewer, bigger calls; smaller: less masked work.
LENGTH_QUANTUM = 2 * PAGE_TOKENS

#: How many tokens of a prompt are computed head by head: one head of a long prompt fits in a processor core's own
#: cache.
TOGETHER = 16

_SOURCE = Path(__file__).with_name("attend.c")
#: Number of floats in a vector of attend.c.
_LANES = 16


def native_kernel(cache: KVCache) -> ctypes.CDLL | None:
    """attend.c, compiled at the first call; None if it cannot serve this cache."""
    sample = cache.k_NKDP[0]
    fits = cache.latent or sample.shape[2] % _LANES == 0
    return library(_SOURCE) if fits and sample.dtype == torch.float32 and sample.device.type == "cpu" else None


class DecodeAttend:
    """The `Attend` of one decode step: row i stores its new key and value at `positions[i]` of the sequence with the
    pages `table_GRW[g, i]` in layers of group g, and attends to every position up to it. `recur`: in models that have
    recurrent layers."""

    latent = True

    def __init__(
        self,
        cache: KVCache,
        table_GRW: npt.NDArray[np.int32],
        positions: Sequence[int] | npt.NDArray[np.int64],
        recur: Recur | None = None,
    ) -> None:
        self._recur = recur
        self._cache, self._table_GRW, self._positions_R = cache, table_GRW, np.asarray(positions, dtype=np.int64)
        self._native = native_kernel(cache)
        self._gathered = [_Gathered(cache, of, self._positions_R) for of in table_GRW if self._native is None]
        self._together = 1

    @classmethod
    def of_prompts(cls, cache: KVCache, pieces: Sequence[Piece], recur: Recur) -> DecodeAttend:
        """The `Attend` of a prefill: each token of each piece is a row, whose result does not depend on the other rows.
        Needs `native_kernel`: elsewhere a pass may not contain several rows of one sequence."""
        lengths = [piece.stop - piece.start for piece in pieces]
        table_GPW = np.zeros((cache.groups, len(pieces), max(pages_of(piece.stop) for piece in pieces)), dtype=np.int32)
        for table_PW, held in ((table_GPW[g], [piece.pages[g] for piece in pieces]) for g in range(cache.groups)):
            for own_W, mine in zip(table_PW, held, strict=True):
                own_W[mine.gone : mine.gone + len(mine.pages)] = mine.pages[: len(own_W) - mine.gone]
        positions = np.concatenate([np.arange(piece.start, piece.stop) for piece in pieces])
        rows = cls(cache, np.repeat(table_GPW, lengths, axis=1), positions, recur)
        rows._together = TOGETHER
        return rows

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, reach: Reach = ALL) -> Tensor:
        group = self._cache.group_of[layer]
        if self._gathered:
            return self._gathered[group].attend(layer, q_THD, k_TKD, v_TKD, reach)
        table_RW = self._table_GRW[group]
        cache, (rows, heads, dim) = self._cache, q_THD.shape
        kv_heads = k_TKD.shape[1]
        q, k, v = (tensor.reshape(rows, -1) for tensor in (q_THD, k_TKD, v_TKD))
        out_THD = torch.empty(rows, heads, v_TKD.shape[2])
        width, threads = table_RW.shape[1], torch.get_num_threads()
        latent = v_TKD.shape[2] if cache.latent else 0
        groups, reached = heads // kv_heads, (reach.window, latent, self._together)
        shape = _Shape(rows, groups, kv_heads, dim, PAGE_TOKENS, width, threads, *reached)
        arguments: list[object] = [_pointer(table_RW.ctypes.data), _pointer(self._positions_R.ctypes.data)]
        for tensor in (q, k, v):
            arguments += [_pointer(tensor.data_ptr()), ctypes.c_int64(tensor.stride(0))]
        pools = (reach.sinks_H, cache.k_NKDP[layer], cache.v_NKPD[layer], out_THD)
        arguments += [_pointer(tensor.data_ptr() if tensor is not None else None) for tensor in pools]
        assert self._native is not None
        if self._native.weft_attend(ctypes.byref(shape), *arguments):
            raise MemoryError("no memory for the scores of a decode step")
        return out_THD

    def recur(self, layer: int, recurrence: Recurrence, x_TI: Tensor, *, apart: bool) -> Tensor:
        assert self._recur is not None
        return self._recur.recur(layer, recurrence, x_TI, apart=apart)


class _Shape(ctypes.Structure):
    """`shape` of attend.c."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ["rows", "groups", "heads", "dim", "page", "width", "threads", "window", "latent", "together"]
    )


_pointer = ctypes.c_void_p


@dataclass(frozen=True)
class _Bucket:
    """Rows that attend over the same rounded length."""

    rows_N: Tensor | None  # which rows of the step; None: all of them, in order
    pages: Tensor  # [N * pages each]
    positions_N: Tensor
    bias_B1L: Tensor  # per row and kv head: 0 where it attends, -inf beyond


class _Gathered:
    """`DecodeAttend` in torch, from copies of the pages."""

    def __init__(self, cache: KVCache, table_RW: npt.NDArray[np.int32], positions_R: npt.NDArray[np.int64]) -> None:
        self._cache = cache
        device = cache.device
        rows_R = np.arange(len(positions_R))
        self._pages_R = torch.from_numpy(table_RW[rows_R, positions_R // PAGE_TOKENS].astype(np.int64)).to(device)
        self._offsets_R = torch.from_numpy(positions_R % PAGE_TOKENS).to(device)
        rounded_R = (positions_R // LENGTH_QUANTUM + 1) * LENGTH_QUANTUM
        together = [np.flatnonzero(rounded_R == length) for length in np.unique(rounded_R)]
        if cache.latent and device.type == "cpu":
            together = list(rows_R[:, None])
        self._buckets = [self._bucket(rows, int(rounded_R[rows[0]]), table_RW, positions_R) for rows in together]

    def _bucket(
        self,
        rows: npt.NDArray[np.int64],
        length: int,
        table_RW: npt.NDArray[np.int32],
        positions_R: npt.NDArray[np.int64],
    ) -> _Bucket:
        cache = self._cache
        device, kv_heads = cache.device, cache.kv_heads
        own = table_RW[rows, : pages_of(length)].astype(np.int64)
        if own.shape[1] < pages_of(length):  # the context ends before the next multiple
            own = np.pad(own, ((0, 0), (0, pages_of(length) - own.shape[1])), mode="edge")
        # Table entries without a page yet name page 0, which is finite, and is masked.
        beyond_NL = np.arange(length)[None] > positions_R[rows][:, None]
        bias_NL = torch.zeros(beyond_NL.shape, dtype=cache.k_NKDP[0].dtype)
        bias_NL.masked_fill_(torch.from_numpy(beyond_NL), -torch.inf)
        return _Bucket(
            rows_N=None if len(rows) == len(positions_R) else torch.from_numpy(rows).to(device),
            pages=torch.from_numpy(own.reshape(-1)).to(device),
            positions_N=torch.from_numpy(positions_R[rows]).to(device),
            bias_B1L=bias_NL.to(device).repeat_interleave(kv_heads, dim=0)[:, None],
        )

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, reach: Reach = ALL) -> Tensor:
        cache = self._cache
        cache.k_NKDP[layer][self._pages_R, :, :, self._offsets_R] = k_TKD
        cache.v_NKPD[layer][self._pages_R, :, self._offsets_R] = v_TKD
        if len(self._buckets) == 1:
            return self._attend_bucket(self._buckets[0], layer, q_THD, reach)
        out_THD = q_THD.new_empty(*q_THD.shape[:2], v_TKD.shape[2])
        for bucket in self._buckets:
            out_THD[bucket.rows_N] = self._attend_bucket(bucket, layer, q_THD, reach)
        return out_THD

    def _attend_bucket(self, bucket: _Bucket, layer: int, q_THD: Tensor, reach: Reach) -> Tensor:
        q_NHD = q_THD if bucket.rows_N is None else q_THD[bucket.rows_N]
        rows, heads, head_dim = q_NHD.shape
        k_MKDP, v_MKPD = (
            pool[layer].index_select(0, bucket.pages) for pool in (self._cache.k_NKDP, self._cache.v_NKPD)
        )
        kv_heads, value_dim = k_MKDP.shape[1], v_MKPD.shape[3]
        k_BDL = k_MKDP.view(rows, -1, kv_heads, head_dim, PAGE_TOKENS).permute(0, 2, 3, 1, 4).flatten(3).flatten(0, 1)
        v_BLD = v_MKPD.view(rows, -1, kv_heads, PAGE_TOKENS, value_dim).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        q_BGD = q_NHD.reshape(rows * kv_heads, -1, head_dim)
        if not reach.window and reach.sinks_H is None:
            return _weighted_values(q_BGD, k_BDL, v_BLD, bucket.bias_B1L).reshape(rows, heads, value_dim)
        bias_B1L = bucket.bias_B1L
        if reach.window:
            lost_NL = torch.arange(k_BDL.shape[2], device=q_BGD.device) <= bucket.positions_N[:, None] - reach.window
            bias_B1L = bias_B1L.masked_fill(lost_NL.repeat_interleave(kv_heads, dim=0)[:, None], -torch.inf)
        scores_BGL = torch.baddbmm(bias_B1L.float(), q_BGD.float(), k_BDL.float(), alpha=head_dim**-0.5)
        scores_KGNL = scores_BGL.view(rows, kv_heads, *scores_BGL.shape[1:]).permute(1, 2, 0, 3)
        weights_BGL = softmax_beside(scores_KGNL, reach.sinks_H).permute(2, 0, 1, 3).flatten(0, 1)
        return torch.bmm(weights_BGL, v_BLD.float()).to(q_THD.dtype).reshape(rows, heads, value_dim)


def _weighted_values(q_BGD: Tensor, k_BDL: Tensor, v_BLD: Tensor, bias_B1L: Tensor) -> Tensor:
    """softmax(q k / sqrt(D) + bias) v, [B, G, D].

    In float32 by plain batched products, because scaled_dot_product_attention on several CPU threads rounds a row by
    the thread that computes it. In shorter types it is used, because it keeps the scores in float32."""
    if q_BGD.dtype != torch.float32:
        bias = bias_B1L.expand(-1, q_BGD.shape[1], -1)
        return F.scaled_dot_product_attention(q_BGD, k_BDL.transpose(1, 2), v_BLD, attn_mask=bias)
    scores_BGL = torch.baddbmm(bias_B1L, q_BGD, k_BDL, alpha=q_BGD.shape[2] ** -0.5)
    return torch.bmm(torch.softmax(scores_BGL, dim=-1), v_BLD)
