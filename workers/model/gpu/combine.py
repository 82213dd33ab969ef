"""What the experts of each token give, put together on a device: one launch, and no copy in the order of tokens.

Shapes: T tokens, K choices, P = T * K pairs sorted by expert, I columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Columns that a block has at a time.
WIDTH = 1024


@triton.jit
def combine(
    y,
    stride_y,
    inverse,
    weights,
    out,
    wide,
    CHOICES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out[t] = sum over k of weights[t, k] y[inverse[t, k]], first to last, in float32."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.full((BLOCK_N,), 0.0, tl.float32)
    for k in tl.static_range(CHOICES):
        pair = tl.load(inverse + token * CHOICES + k)
        found = tl.load(y + pair * stride_y + n, n < wide, 0.0).to(tl.float32)
        if WEIGHTED:
            found *= tl.load(weights + token * CHOICES + k)
        total += found
    tl.store(out + token * wide + n, total, n < wide)


def combined(y_PI: Tensor, inverse_P: Tensor, choices: int, weights_TK: Tensor | None = None) -> Tensor:
    """sum_k weights[:, k] * y[inverse[:, k]], [T, I] float32; without weights the plain sum."""
    tokens, wide = len(inverse_P) // choices, y_PI.shape[1]
    out_TI = torch.empty(tokens, wide, device=y_PI.device)
    if tokens:
        block = min(WIDTH, triton.next_power_of_2(wide))
        weights = weights_TK.contiguous() if weights_TK is not None else out_TI
        combine[tokens, triton.cdiv(wide, block)](
            y_PI, y_PI.stride(0), inverse_P, weights, out_TI, wide,
            CHOICES=choices, WEIGHTED=weights_TK is not None, BLOCK_N=block,
        )  # fmt: skip
    return out_TI
