"""Queries and keys on a device between their product and attention: each head normed, turned and rounded in one pass,
forward and backward, of the fused product as it lies. Checked in Triton's interpreter.

Shapes: T tokens, H heads, K key-value heads, D numbers of a head, O = (H + 2K) D.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

#: Heads that a block has at a time.
HEADS = 8


@triton.jit
def _tile(heads, dim, turned, HEADS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Heads and numbers of this block; the other number of the plane in which each turns, itself where none does, and
    the sign with which that one is added."""
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    j = tl.arange(0, BLOCK_D)
    half = turned // 2
    other = tl.where(j < half, j + half, tl.where(j < turned, j - half, j))
    sign = tl.where(j < half, -1.0, 1.0)
    return head, j, other, sign, (head < heads)[:, None] & (j < dim)[None]


@triton.jit
def _root(x, dim, eps):
    return 1 / tl.sqrt(tl.sum(x * x, 1) / dim + eps)


@triton.jit
def turn(
    x, stride_x, norm, cos, sin, out, heads, dim, turned, eps,
    NORMED: tl.constexpr, HEADS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out = y cos + (the other number of the plane, signed) sin, where y is the head over its root mean square, times
    `norm`, or x."""
    token = tl.program_id(0).to(tl.int64)
    head, j, other, sign, mask = _tile(heads, dim, turned, HEADS, BLOCK_D)
    at = x + token * stride_x + head[:, None] * dim
    own = tl.load(at + j[None], mask, 0.0)
    crossed = tl.load(at + other[None], mask, 0.0)
    if NORMED:
        root = _root(own, dim, eps)[:, None]
        own *= root * tl.load(norm + j, j < dim, 0.0)[None]
        crossed *= root * tl.load(norm + other, j < dim, 0.0)[None]
    c = tl.load(cos + token * turned + j, j < turned, 1.0)[None]
    s = tl.load(sin + token * turned + j, j < turned, 0.0)[None]
    y = own * c + crossed * sign[None] * s
    tl.store(out + (token * heads + head[:, None]) * dim + j[None], y.to(out.dtype.element_ty), mask)


@triton.jit
def turn_backward(
    x, stride_x, norm, cos, sin, dout, dx, stride_dx, heads, dim, turned, eps,
    NORMED: tl.constexpr, HEADS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dx of `turn`."""
    token = tl.program_id(0).to(tl.int64)
    head, j, other, sign, mask = _tile(heads, dim, turned, HEADS, BLOCK_D)
    at = dout + (token * heads + head[:, None]) * dim
    c = tl.load(cos + token * turned + j, j < turned, 1.0)[None]
    s = tl.load(sin + token * turned + other, j < turned, 0.0)[None]
    # What this number adds to the other's: its sign there is the other one.
    dy = tl.load(at + j[None], mask, 0.0).to(tl.float32) * c
    dy -= tl.load(at + other[None], mask, 0.0).to(tl.float32) * sign[None] * s
    if NORMED:
        own = tl.load(x + token * stride_x + head[:, None] * dim + j[None], mask, 0.0)
        root = _root(own, dim, eps)[:, None]
        dy *= tl.load(norm + j, j < dim, 0.0)[None]
        dy = root * (dy - own * root * root * (tl.sum(dy * own, 1) / dim)[:, None])
    tl.store(dx + token * stride_dx + head[:, None] * dim + j[None], dy, mask)


class Heads(NamedTuple):
    """Of an attention: H, K and D, the norms of queries and keys, the angles (`parts/rotary.py`) and the dtype of what
    comes out."""

    counts: tuple[int, int]
    dim: int
    norms: tuple[Tensor | None, Tensor | None]
    eps: float
    angles: tuple[Tensor, Tensor]
    dtype: torch.dtype

    def apart(self, qkv_TO: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, H, D], k and v [T, K, D]: queries and keys normed and turned. Differentiable in qkv, float32."""
        return cast(tuple[Tensor, Tensor, Tensor], _Apart.apply(qkv_TO, self))  # type: ignore[no-untyped-call]

    def turned(self) -> list[tuple[int, int, Tensor | None]]:
        """Of queries and of keys: their first column, how many there are, their norm."""
        (h, k), dim = self.counts, self.dim
        return [(0, h, self.norms[0]), (h * dim, k, self.norms[1])]

    def launch(self, kernel: Any, x_TI: Tensor, heads: int, norm_D: Tensor | None, *rest: Any) -> None:
        cos, sin = (each.contiguous() for each in self.angles)
        norm = norm_D if norm_D is not None else cos
        if len(x_TI):
            kernel[len(x_TI), triton.cdiv(heads, HEADS)](
                x_TI, x_TI.stride(0), norm, cos, sin, *rest, heads, self.dim, cos.shape[-1], self.eps,
                NORMED=norm_D is not None, HEADS=HEADS, BLOCK_D=triton.next_power_of_2(self.dim),
            )  # fmt: skip


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv_TO: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(qkv_TO)
        ctx.heads = heads
        found = []
        for start, count, norm_D in heads.turned():
            out = qkv_TO.new_empty(len(qkv_TO), count, heads.dim, dtype=heads.dtype)
            heads.launch(turn, qkv_TO[:, start:], count, norm_D, out)
            found.append(out)
        values = qkv_TO[:, sum(heads.counts) * heads.dim :].to(heads.dtype)
        return found[0], found[1], values.view(len(values), -1, heads.dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, None]:
        (qkv_TO,) = ctx.saved_tensors
        heads, dqkv_TO = ctx.heads, torch.empty_like(qkv_TO)
        for (start, count, norm_D), dout in zip(heads.turned(), (dq, dk), strict=True):
            own = dqkv_TO[:, start:]
            heads.launch(turn_backward, qkv_TO[:, start:], count, norm_D, dout.contiguous(), own, own.stride(0))
        dqkv_TO[:, sum(heads.counts) * heads.dim :] = dv.reshape(len(dv), -1)
        return dqkv_TO, None
