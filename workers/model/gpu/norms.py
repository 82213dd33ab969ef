"""The RMSNorm before a linear on a device, together with the residual added to the hidden state before it: one pass
forward and one backward. workers/model/decoder.py calls it.

Shapes: T tokens, D hidden.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from workers.model.gpu import fused_kernels


def add_norm(
    x_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x + delta (x itself without one), float32, and its RMSNorm: the sum over the root of the mean of its squares,
    times the weight (arXiv 1910.07467), rounded once to `dtype`, that of the next products. Differentiable in x and
    delta; the weight is frozen."""
    if torch.is_grad_enabled() and (x_TD.requires_grad or (delta_TD is not None and delta_TD.requires_grad)):
        return cast(tuple[Tensor, Tensor], _AddNorm.apply(x_TD, delta_TD, weight_D, eps, dtype))  # type: ignore[no-untyped-call]
    return _forward(x_TD, delta_TD, weight_D, eps, dtype)


def _forward(
    x_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    x_TD, out_TD = x_TD.contiguous(), torch.empty_like(x_TD, dtype=dtype, memory_format=torch.contiguous_format)
    total_TD = x_TD if delta_TD is None else torch.empty_like(x_TD)
    given = x_TD if delta_TD is None else delta_TD.contiguous()
    if len(x_TD):
        fused_kernels.add_norm[len(x_TD),](
            x_TD, given, weight_D, total_TD, out_TD, x_TD.shape[1], eps, ADDED=delta_TD is not None, **_fixed(x_TD)
        )
    return total_TD, out_TD


def _fixed(x_TD: Tensor) -> dict[str, int]:
    block = triton.next_power_of_2(x_TD.shape[1])
    return {"BLOCK_D": block, "num_warps": min(16, max(1, block // 512))}


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        total_TD, out_TD = _forward(x_TD, delta_TD, weight_D, eps, dtype)
        ctx.save_for_backward(total_TD, weight_D)
        ctx.eps, ctx.added = eps, delta_TD is not None
        return total_TD, out_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal_TD: Tensor, dout_TD: Tensor) -> tuple[Tensor | None, ...]:
        total_TD, weight_D = ctx.saved_tensors
        dx_TD = torch.empty_like(total_TD)
        if len(dx_TD):
            fused_kernels.add_norm_backward[len(dx_TD),](
                total_TD, weight_D, dtotal_TD.contiguous(), dout_TD.contiguous(), dx_TD, dx_TD.shape[1], ctx.eps,
                **_fixed(dx_TD),
            )  # fmt: skip
        return dx_TD, dx_TD if ctx.added else None, None, None, None
