"""On a device: tokens spread to their experts, and the experts' outputs summed per token together with what adapters
add. One launch each (`fused_kernels.py`); mixture/choices.py calls it.

Shapes: T tokens, K choices, P = T * K pairs sorted by expert, I columns.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from workers.model.gpu import fused_kernels
from workers.model.gpu.launch import Tile, TritonProducts, where
from workers.model.lora.products import Added

#: The most columns of a block, and the most numbers that a block of `gather` copies.
WIDTH, COPIED = 1024, 8192
#: The tile if adapters add to the result (chosen by bench/gpu_tiles.py).
ADDED = Tile(128, 8)


def spread(x_TI: Tensor, token_P: Tensor) -> Tensor:
    """x[token], [P, I], in the dtype of x."""
    pairs, wide = len(token_P), x_TI.shape[1]
    out_PI = x_TI.new_empty(pairs, wide)
    if pairs:
        block = min(WIDTH, triton.next_power_of_2(wide))
        rows = min(128, COPIED // block)
        fused_kernels.gather[triton.cdiv(pairs, rows), triton.cdiv(wide, block)](
            x_TI, x_TI.stride(0), token_P, out_PI, pairs, wide, BLOCK_P=rows, BLOCK_N=block
        )  # fmt: skip
    return out_PI


def combined(
    y_PI: Tensor,
    inverse_P: Tensor,
    choices: int,
    weights_TK: Tensor | None = None,
    added: Added | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """sum_k weights[:, k] * y[inverse[:, k]], [T, I], plus `added`; without weights the plain sum. Summed in float32 in
    the order of choices, rounded once to `dtype`. `inverse_P` int64: the place of each (token, choice) in y.

    Tokens whose adapter lacks the factor of `added` get the sum alone, from a launch over all tokens before the
    others."""
    tokens, wide = len(inverse_P) // choices, y_PI.shape[1]
    out_TI = torch.empty(tokens, wide, device=y_PI.device, dtype=dtype)
    if not tokens:
        return out_TI
    weights = weights_TK.contiguous() if weights_TK is not None else out_TI
    given, fixed = (y_PI, y_PI.stride(0), inverse_P, weights, out_TI), {"CHOICES": choices}
    fixed["WEIGHTED"] = weights_TK is not None
    tiled = added.products if added is not None and isinstance(added.products, TritonProducts) else None
    if added is None or tiled is None or not tiled.table.all_have(added.name):
        block = min(WIDTH, triton.next_power_of_2(wide))
        fused_kernels.gather_sum[tokens, triton.cdiv(wide, block)](*given, wide, **fixed, BLOCK_N=block)
    if added is not None and tiled is None:
        added.products.expand(out_TI, added.u_T, added.name, stack=added.stack, scaled=False)
    if added is None or tiled is None:
        return out_TI
    for each, blocks in tiled.blocks:
        tile = ADDED.beside(each.block)
        fused_kernels.gather_sum_expand[len(blocks.segment), triton.cdiv(wide, tile.columns)](
            *given, added.u_T, added.u_T.stride(0), tiled.table.weights(added.name),
            *where(tiled.table, blocks, tiled.segments), wide, STACK=added.stack, PRECISION=tiled.precision.name,
            BLOCK_M=blocks.block_rows, BLOCK_R=each.block, **fixed, **tile.fixed,
        )  # fmt: skip
    return out_TI
