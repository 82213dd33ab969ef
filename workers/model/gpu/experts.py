"""Products with the frozen experts in one Triton launch. The grid follows from the number of rows alone, so a CUDA
graph may contain it. For the few rows of a decode step, and for devices and dtypes that torch's grouped product does
not take (lora/base_mm.py); with many rows libraries are faster.

Shapes: P rows sorted by expert, E experts, O out, I in.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from workers.model.gpu import kernels
from workers.model.gpu.segments import EXPERT_ROWS

#: Columns of the output and of the input that a block has at a time.
BLOCK_N, BLOCK_K = 64, 64

#: How many pairs (or blocks of rows) a program compares with all other pairs (or with all experts).
TOGETHER = 16


def expert_mm(x_PI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """y_p = x_p W_e^T [P, O] for each row's expert e, in the weights' dtype, which x must have, too. `ends_E` int32:
    where the rows of each expert end. No block holds rows of two experts."""
    experts, out, inner = weight_EOI.shape
    y_PO = x_PI.new_empty(len(x_PI), out)
    if not len(x_PI):
        return y_PO
    most = max(1, len(x_PI) // EXPERT_ROWS + min(experts, len(x_PI)))
    block_expert, first_block = (ends_E.new_empty(size) for size in (most, experts))
    kernels.expert_blocks[-(-most // TOGETHER),](
        ends_E,
        block_expert,
        first_block,
        experts,
        most,
        BLOCK_M=EXPERT_ROWS,
        BLOCK_E=triton.next_power_of_2(experts),
        BLOCK_B=TOGETHER,
    )
    x_PI = x_PI.contiguous()
    kernels.experts[most, -(-out // BLOCK_N)](
        x_PI,
        x_PI.stride(0),
        weight_EOI,
        *weight_EOI.stride(),
        y_PO,
        y_PO.stride(0),
        block_expert,
        first_block,
        ends_E,
        experts,
        inner,
        out,
        BLOCK_M=EXPERT_ROWS,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
    )
    return y_PO


def sort_pairs(experts_P: Tensor, choices: int, num_experts: int) -> tuple[Tensor, ...]:
    """`Routing`'s experts, order, inverse, token and ends_E in one launch; for few pairs, since each is compared with
    all. `experts_P`: the expert of each (token, choice)."""
    pairs = len(experts_P)
    found = [torch.empty_like(experts_P), *(experts_P.new_empty(pairs, dtype=torch.int64) for _ in range(3))]
    ends_E = experts_P.new_empty(num_experts, dtype=torch.int32)
    kernels.sort_pairs[-(-max(pairs, num_experts) // TOGETHER),](
        experts_P,
        *found,
        ends_E,
        pairs,
        choices,
        num_experts,
        BLOCK=TOGETHER,
        BLOCK_P=triton.next_power_of_2(pairs),
    )
    return *found, ends_E
