"""Attention over packed sequences.

The decoder hands rotated queries and keys of all packed tokens to an `Attend`, which alone decides what each token may
attend to. PackedAttend is causal attention within each sequence of the batch; the generator has its own, over its
cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.gpu import varlen


class Attend(Protocol):
    """q [tokens, heads, head_dim]; k, v [tokens, kv_heads, head_dim] -> out [tokens, heads, head_dim]."""

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor: ...


OnKv = Callable[[int, Tensor, Tensor], None]


class PackedAttend:
    """Causal attention within each of the packed sequences, differentiable.

    Sequences of equal length share one call, so nothing is padded and no result depends on another's length; 16-bit
    tensors on CUDA take one call for all.
    `on_kv(layer, k, v)` is called with the packed keys and values of every layer, for a prefill that keeps them.
    """

    def __init__(self, lengths: Sequence[int], on_kv: OnKv | None = None) -> None:
        if any(length < 1 for length in lengths):
            raise ValueError(f"every packed sequence needs a token: {list(lengths)}")
        self._on_kv, self._lengths = on_kv, list(lengths)
        starts = [0, *accumulate(lengths)]
        by_length: dict[int, list[int]] = {}
        for start, length in zip(starts, lengths, strict=False):
            by_length.setdefault(length, []).append(start)
        self._buckets = [(len(members), length) for length, members in by_length.items()]
        if len(self._buckets) > 1:
            order = [torch.arange(start, start + n) for n, members in by_length.items() for start in members]
            self._order: Tensor | None = torch.cat(order)
            self._inverse = torch.argsort(self._order)
        else:
            self._order = None

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        if self._on_kv is not None:
            self._on_kv(layer, k_TKD, v_TKD)
        if q_THD.is_cuda and varlen.takes(q_THD):
            return self._varlen(q_THD, k_TKD, v_TKD)
        if self._order is None:
            return self._by_bucket(q_THD, k_TKD.contiguous(), v_TKD.contiguous())
        if self._order.device != q_THD.device:
            self._order, self._inverse = self._order.to(q_THD.device), self._inverse.to(q_THD.device)
        order, inverse = self._order, self._inverse
        q, k, v = (_permute(t, order, inverse) for t in (q_THD, k_TKD, v_TKD))
        return _permute(self._by_bucket(q, k, v), inverse, order)

    @cached_property
    def _varlen(self) -> varlen.VarlenAttend:
        return varlen.VarlenAttend(self._lengths)

    def _by_bucket(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        outs, at = [], 0
        for count, length in self._buckets:
            rows = slice(at, at + count * length)
            q, k, v = (t[rows].view(count, length, *t.shape[1:]).transpose(1, 2) for t in (q_THD, k_TKD, v_TKD))
            gqa = q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
            outs.append(out.transpose(1, 2).flatten(0, 1))
            at += count * length
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def _permute(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    return cast(Tensor, _Permute.apply(x, order, inverse))  # type: ignore[no-untyped-call]


class _Permute(torch.autograd.Function):
    """Reorder rows. The gradient is a gather by the inverse; the one of index_select would scatter row by row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return dy.index_select(0, ctx.inverse), None, None
