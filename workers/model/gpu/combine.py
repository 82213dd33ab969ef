"""Tokens on a device, given to their experts, and what these give, put together: a launch each.

Shapes: T tokens, K choices, P = T * K pairs sorted by expert, I columns.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from workers.model.gpu import fused_kernels

#: Columns that a block has at a time, and how many numbers it copies.
WIDTH, COPIED = 1024, 8192


def spread(x_TI: Tensor, token_P: Tensor) -> Tensor:
    """x[token], [P, I]."""
    pairs, wide = len(token_P), x_TI.shape[1]
    out_PI = x_TI.new_empty(pairs, wide)
    if pairs:
        block = min(WIDTH, triton.next_power_of_2(wide))
        rows = min(128, COPIED // block)
        fused_kernels.gather[triton.cdiv(pairs, rows), triton.cdiv(wide, block)](
            x_TI, x_TI.stride(0), token_P, out_PI, pairs, wide, BLOCK_P=rows, BLOCK_N=block
        )  # fmt: skip
    return out_PI


def combined(y_PI: Tensor, inverse_P: Tensor, choices: int, weights_TK: Tensor | None = None) -> Tensor:
    """sum_k weights[:, k] * y[inverse[:, k]], [T, I] float32; without weights the plain sum."""
    tokens, wide = len(inverse_P) // choices, y_PI.shape[1]
    out_TI = torch.empty(tokens, wide, device=y_PI.device)
    if tokens:
        block = min(WIDTH, triton.next_power_of_2(wide))
        weights = weights_TK.contiguous() if weights_TK is not None else out_TI
        fused_kernels.gather_sum[tokens, triton.cdiv(wide, block)](
            y_PI, y_PI.stride(0), inverse_P, weights, out_TI, wide,
            CHOICES=choices, WEIGHTED=weights_TK is not None, BLOCK_N=block,
        )  # fmt: skip
    return out_TI
