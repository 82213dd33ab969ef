"""SwiGLU inside of experts on a device, forward and backward, in one pass with the adapters' inner factors (B of gate
and up, A of down). mixture/experts.py calls it between the base's two products.

The base's pre-activations are read once, in the weights' dtype. A tile adds the low-rank parts in float32, is
activated, and is rounded once to the dtype of the base's next product; the adapters' products read the same rounded
numbers.

Invariant (isolation): rows and ranks are cut into blocks as in kernels.py, so a segment's results depend on its own
rows alone.

Shapes: P pairs sorted by expert, F expert width, G = 2F (gate beside up), r rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from workers.model.gpu import fused_kernels
from workers.model.gpu.launch import HELD, Tile, TritonProducts
from workers.model.gpu.segments import EXPERT_ROWS
from workers.model.lora.products import LoraProducts

#: The tiles of the kernels. None tried was faster on an H100, for 64 adapters of rank 8 on a 30B model
#: (bench/gpu_tiles.py).
FORWARD, FORWARD_HELD, BACKWARD = Tile(256, 4), Tile(64, 2), Tile(64, 2)
#: How many columns one program of a forward computes if it holds u.
SPLIT = 1024


class Inside(NamedTuple):
    """The arguments of `activate` and of its backward: the base's products of gate and up [P, G] in `dtype`; u = scale
    * x A^T [P, >= 2r] float32, with the adapters' products; and the names of the inner factors."""

    gate_up_PG: Tensor
    u_P: Tensor | None
    paired: TritonProducts | None
    inner_b: tuple[str, ...]
    down_a: str
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        gate_up_PG: Tensor,
        u_P: Tensor | None,
        products: LoraProducts | None,
        inner_b: tuple[str, ...],
        down_a: str,
    ) -> Inside:
        """If the products are not tiled (a decode step's), adds the low-rank parts here, in float32, and leaves only
        the activation to the kernel."""
        dtype = gate_up_PG.dtype
        if products is None or u_P is None:
            return cls(gate_up_PG, None, None, inner_b, down_a, dtype)
        if isinstance(products, TritonProducts):
            return cls(gate_up_PG, u_P, products, inner_b, down_a, dtype)
        gate_up_PG = gate_up_PG.to(torch.float32)
        products.add(gate_up_PG, None, u_P, "", [(name, gate_up_PG.shape[1] // 2) for name in inner_b], scaled=False)
        return cls(gate_up_PG, None, None, inner_b, down_a, dtype)

    def activate(self) -> Tensor:
        """h_PF = silu(gate) * up, for gate and up with their low-rank parts, in `dtype`."""
        pairs, wide = len(self.gate_up_PG), self.gate_up_PG.shape[1] // 2
        h_PF = self.gate_up_PG.new_empty(pairs, wide, dtype=self.dtype)
        for blocks, where, fixed in self._launches():
            tile = FORWARD_HELD if fixed["HELD"] else FORWARD.beside(fixed["BLOCK_R"])
            split = min(SPLIT, triton.cdiv(wide, tile.columns) * tile.columns) if fixed["HELD"] else tile.columns
            grid = blocks, triton.cdiv(wide, split)
            fused_kernels.swiglu[grid](self.gate_up_PG, *where, h_PF, wide, SPLIT=split, **fixed, **tile.fixed)
        return h_PF

    def backward(self, dh_PF: Tensor, dv_P: Tensor | None, weights_P: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """From dh_PF, the base's part of the gradient of weight * h, and dv, the gradient of weight * h A^T: h_PF (None
        without adapters, which alone need it), dgate_up_PG, and dweights_P of the router. The adapters' part dv A of
        the gradient is added in the kernel."""
        h_PF = torch.empty_like(dh_PF) if dv_P is not None and self.paired is not None else None
        dgate_up_PG, dweights_P = torch.empty_like(self.gate_up_PG), torch.empty_like(weights_P)
        for blocks, where, fixed in self._launches():
            tile = BACKWARD.beside(fixed["BLOCK_R"])
            down = (dh_PF, 0, dh_PF)
            if fixed["ADAPTED"] and dv_P is not None and self.paired is not None:
                down = (dv_P, dv_P.stride(0), self.paired.table.weights(self.down_a))
            results = (h_PF if h_PF is not None else dh_PF, dgate_up_PG, dweights_P)
            fused_kernels.swiglu_backward[blocks,](
                self.gate_up_PG, *where, dh_PF, *down, weights_P, *results, dh_PF.shape[1],
                KEPT=h_PF is not None, **fixed, **tile.fixed,
            )  # fmt: skip
        return h_PF, dgate_up_PG, dweights_P

    def _launches(self) -> Iterator[tuple[int, tuple[Any, ...], dict[str, Any]]]:
        """For each launch: its blocks, the arguments from `u` to `rows`, and the constants that are compiled into it.
        If some rows lack an adapter, a first launch computes all rows as if none had one."""
        pairs, products, nothing = len(self.gate_up_PG), self.paired, self.gate_up_PG
        if not pairs:
            return
        fixed = {"BLOCK_M": EXPERT_ROWS}
        if products is None or self.u_P is None or not products.table.all_have(self.down_a):
            unused = (nothing, 0, *[nothing] * 6, 1, 1, pairs)
            yield (
                triton.cdiv(pairs, EXPERT_ROWS),
                unused,
                fixed | {"ADAPTED": False, "HELD": False, "PRECISION": "ieee", "BLOCK_R": 16},
            )
        if products is None or self.u_P is None:
            return
        table, segments = products.table, products.segments
        gate, up = (table.weights(name) for name in self.inner_b)
        for each, blocks in products.blocks:
            where = (blocks.segment, blocks.first, segments.start, segments.num_experts * segments.num_groups)
            arguments = (self.u_P, self.u_P.stride(0), gate, up, table.ranks_G, *where, segments.num_groups, pairs)
            of = {"ADAPTED": True, "HELD": each.block <= HELD, "PRECISION": products.precision.name}
            yield len(blocks.segment), arguments, fixed | of | {"BLOCK_R": each.block}
