"""Attention over packed sequences.

The decoder hands rotated queries and keys of all packed tokens to an `Attend`, which alone decides what each token may
attend to. PackedAttend is causal attention within each sequence of the batch; the generator has its own, over its
cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.gpu import varlen
from workers.model.recur import Packed, Recurrence, run_each


@dataclass(frozen=True)
class Reach:
    """The positions that a layer's queries attend to: the last `window`, including their own (0: all). With `sinks_H`,
    each head has a score that takes part in the softmax but adds no value."""

    window: int = 0
    sinks_H: Tensor | None = None

    def all_of(self, length: int) -> bool:
        """True if this is plain causal attention over that many positions."""
        return self.sinks_H is None and (self.window == 0 or self.window >= length)


#: All positions up to the query's own.
ALL = Reach()


class Attend(Protocol):
    """q [tokens, heads, head_dim]; k, v [tokens, kv_heads, head_dim] -> out [tokens, heads, head_dim]. `latent`: it
    keeps keys and values, and those of latent attention by what they come of (parts/latent.py)."""

    @property
    def latent(self) -> bool: ...

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, reach: Reach = ALL) -> Tensor: ...


#: How many coordinates heads get in addition if there are sinks, so that rows stay aligned.
SINK_ROOM = 16


class PackedAttend:
    """Causal attention within each of the packed sequences, differentiable; and a `Recur` that begins each anew.

    Sequences of equal length share one call, so nothing is padded and no result depends on another's length; 16-bit
    tensors on CUDA take one call for all.
    """

    latent = False

    def __init__(self, lengths: Sequence[int]) -> None:
        if any(length < 1 for length in lengths):
            raise ValueError(f"every packed sequence needs a token: {list(lengths)}")
        self._lengths = list(lengths)
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

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, reach: Reach = ALL) -> Tensor:
        if q_THD.is_cuda and varlen.takes(q_THD) and reach.sinks_H is None:
            return self._varlen(q_THD, k_TKD, v_TKD, reach.window)
        if self._order is None:
            return self._by_bucket(q_THD, k_TKD.contiguous(), v_TKD.contiguous(), reach)
        if self._order.device != q_THD.device:
            self._order, self._inverse = self._order.to(q_THD.device), self._inverse.to(q_THD.device)
        order, inverse = self._order, self._inverse
        q, k, v = (_permute(t, order, inverse) for t in (q_THD, k_TKD, v_TKD))
        return _permute(self._by_bucket(q, k, v, reach), inverse, order)

    def recur(self, layer: int, recurrence: Recurrence, x_TI: Tensor, *, apart: bool) -> Tensor:
        return run_each(recurrence, x_TI, self._packed, apart=apart)

    @cached_property
    def _packed(self) -> Packed:
        return Packed(self._lengths)

    @cached_property
    def _varlen(self) -> varlen.VarlenAttend:
        return varlen.VarlenAttend(self._lengths)

    def _by_bucket(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, reach: Reach) -> Tensor:
        outs, at = [], 0
        for count, length in self._buckets:
            rows = slice(at, at + count * length)
            q, k, v = (t[rows].view(count, length, *t.shape[1:]).transpose(1, 2) for t in (q_THD, k_TKD, v_TKD))
            out = _causal(q, k, v) if reach.all_of(length) else _reaching(q, k, v, reach)
            outs.append(out.transpose(1, 2).flatten(0, 1))
            at += count * length
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def _causal(q_NHLD: Tensor, k_NKLD: Tensor, v_NKLD: Tensor) -> Tensor:
    grouped = q_NHLD.shape[1] != k_NKLD.shape[1]
    return F.scaled_dot_product_attention(q_NHLD, k_NKLD, v_NKLD, is_causal=True, enable_gqa=grouped)


def _reaching(q_NHLD: Tensor, k_NKLD: Tensor, v_NKLD: Tensor, reach: Reach) -> Tensor:
    """Causal attention within a window, or with sinks, by a mask. A sink is one more position that every query reaches:
    its value is zero, and heads have one more coordinate, in which its key is one and the others are zero and the
    query is what makes the score the sink. So no scores are ever written out."""
    length, dim = q_NHLD.shape[2:]
    at = torch.arange(length, device=q_NHLD.device)
    seen_LL = at[None] <= at[:, None]
    if reach.window:
        seen_LL &= at[None] > at[:, None] - reach.window
    grouped, scale = q_NHLD.shape[1] != k_NKLD.shape[1], dim**-0.5
    if reach.sinks_H is not None:
        own_NHL1 = (reach.sinks_H / scale).to(q_NHLD.dtype)[:, None, None].expand(*q_NHLD.shape[:3], 1)
        q_NHLD = F.pad(torch.cat((q_NHLD, own_NHL1), dim=-1), (0, SINK_ROOM - 1))
        k_NKLD = F.pad(k_NKLD, (0, SINK_ROOM, 0, 1))
        k_NKLD[:, :, length, dim] = 1
        v_NKLD = F.pad(v_NKLD, (0, SINK_ROOM, 0, 1))
        seen_LL = F.pad(seen_LL, (0, 1), value=True)
    out_NHLD = F.scaled_dot_product_attention(
        q_NHLD, k_NKLD, v_NKLD, attn_mask=seen_LL, scale=scale, enable_gqa=grouped
    )
    return out_NHLD[..., :dim]


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
