"""Log-probabilities over a vocabulary on a device: its logits are read once in the forward, and once more in the
backward, which leaves their gradient in their place.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from workers.model.gpu import fused_kernels

#: Numbers that a block has at a time.
WIDTH = 4096


def log_sums(logits_RV: Tensor) -> Tensor:
    """[R] float32."""
    rows, wide = logits_RV.shape
    found_R = torch.empty(rows, device=logits_RV.device)
    fused_kernels.log_sum[(rows,)](logits_RV, logits_RV.stride(0), found_R, wide, BLOCK_N=WIDTH, num_warps=8)
    return found_R


def softmax_times_(logits_RV: Tensor, log_sums_R: Tensor, factors_R: Tensor) -> Tensor:
    """factors * softmax(logits), in the place of the logits."""
    rows, wide = logits_RV.shape
    grid = rows, triton.cdiv(wide, WIDTH)
    fused_kernels.softmax_times[grid](
        logits_RV, logits_RV.stride(0), log_sums_R, factors_R, wide, BLOCK_N=WIDTH, num_warps=8
    )
    return logits_RV
