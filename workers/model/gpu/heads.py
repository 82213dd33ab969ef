"""Queries and keys on a device between their product and attention: each head normed, turned and rounded in one pass,
forward and backward, of the fused product as it lies.

Shapes: T tokens, H heads, K key-value heads, D numbers of a head, O = (H + 2K) D.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from workers.model.gpu import fused_kernels

#: Heads that a block has at a time.
HEADS = 8


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
            heads.launch(fused_kernels.turn, qkv_TO[:, start:], count, norm_D, out)
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
            heads.launch(
                fused_kernels.turn_backward, qkv_TO[:, start:], count, norm_D, dout.contiguous(), own, own.stride(0)
            )
        dqkv_TO[:, sum(heads.counts) * heads.dim :] = dv.reshape(len(dv), -1)
        return dqkv_TO, None
