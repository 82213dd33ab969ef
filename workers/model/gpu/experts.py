"""Products with the frozen experts in one Triton launch that a CUDA graph may hold: the host knows its grid from the
number of rows alone, in any dtype and on any device that Triton serves. For the few rows of a decode step; with many,
libraries are faster.

Shapes: P rows sorted by expert, E experts, O out, I in.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.gpu import kernels
from workers.model.gpu.segments import EXPERT_ROWS, Segments

#: Columns of the output and of the input that a block has at a time.
BLOCK_N, BLOCK_K = 64, 64


def expert_mm(x_PI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """y_P = x W_e^T, in the weights' dtype, which x has, too. `ends_E` int32: where the rows of each expert end."""
    experts, out, inner = weight_EOI.shape
    y_PO = x_PI.new_empty(len(x_PI), out)
    if not len(x_PI):
        return y_PO
    segments = Segments(F.pad(ends_E.long(), (1, 0)), 1, experts, len(x_PI), EXPERT_ROWS)
    blocks = segments.blocks(torch.ones(1, dtype=torch.bool, device=x_PI.device))
    x_PI = x_PI.contiguous()
    kernels.experts[len(blocks.segment), -(-out // BLOCK_N)](
        x_PI,
        x_PI.stride(0),
        weight_EOI,
        *weight_EOI.stride(),
        y_PO,
        y_PO.stride(0),
        blocks.segment,
        blocks.first,
        segments.start,
        experts,
        inner,
        out,
        PRECISION="ieee" if x_PI.dtype == torch.float32 else "tf32",  # which holds bfloat16 exactly
        BLOCK_M=blocks.block_rows,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
    )
    return y_PO
