"""SwiGLU inside of experts on a device, forward and backward, with the adapters' inner factors in the same pass.

What the base's products give is read once, in the weights' dtype, and never written out in float32: a tile gets its
low-rank parts in float32, is activated, and is rounded once to what the next product of the base takes, which the
adapters' products then take, too. Blocks and ranks are those of kernels.py, so what a segment gets depends on its own
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
from workers.model.gpu.launch import Tile, TritonProducts
from workers.model.gpu.segments import EXPERT_ROWS
from workers.model.lora_products import LoraProducts

#: As fast as any on an H100, for 64 adapters of rank 8 on a 30B model (bench/gpu_tiles.py).
FORWARD, BACKWARD = Tile(256, 4), Tile(128, 4)
#: Of the backward of ranks up to OWNED_RANK, whose gradients stay in registers beside it.
OWNED, OWNED_RANK = Tile(64, 4), 32


class Inside(NamedTuple):
    """What `activate` is given and its backward again: base's products of gate and up [P, G], and u = scale * x A^T of
    the adapters [P, >= 2r] with their products and the names of their factors."""

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
        """Products that are not tiled, those of a decode step, are added before."""
        dtype = gate_up_PG.dtype
        if products is None or u_P is None:
            return cls(gate_up_PG, None, None, inner_b, down_a, dtype)
        if isinstance(products, TritonProducts):
            return cls(gate_up_PG, u_P, products, inner_b, down_a, dtype)
        gate_up_PG = gate_up_PG.to(torch.float32)
        products.add(gate_up_PG, None, u_P, "", [(name, gate_up_PG.shape[1] // 2) for name in inner_b], scaled=False)
        return cls(gate_up_PG, None, None, inner_b, down_a, dtype)

    def activate(self) -> Tensor:
        """h_PF = silu(gate) * up, of gate and up with their low-rank parts, in `dtype`, that of base's products."""
        pairs, wide = len(self.gate_up_PG), self.gate_up_PG.shape[1] // 2
        h_PF = self.gate_up_PG.new_empty(pairs, wide, dtype=self.dtype)
        for blocks, where, fixed in self._launches(self.paired):
            tile = FORWARD.beside(fixed["BLOCK_R"])
            grid = blocks, triton.cdiv(wide, tile.columns)
            fused_kernels.swiglu[grid](self.gate_up_PG, *where, h_PF, wide, **fixed, **tile.fixed)
        return h_PF

    def backward(self, dh_PF: Tensor, dv_P: Tensor | None, weights_P: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Of the gradient of h before the router's weight, without the part dv A that the adapters have in it:
        dgate_up_PG behind that weight, du_P and dweights_P. The gradients of the factors are added."""
        dgate_up_PG, paired = torch.empty_like(self.gate_up_PG), self.paired
        if dv_P is None or self.u_P is None or paired is None:
            dweights_P = torch.empty_like(weights_P)
            self._by_rows(None, dh_PF, None, weights_P, (None, dgate_up_PG, dweights_P))
            return dgate_up_PG, None, dweights_P
        few, many = paired.of_ranks(OWNED_RANK), paired.of_ranks(OWNED_RANK, beyond=True)
        dweights_SP = weights_P.new_zeros(triton.cdiv(dh_PF.shape[1], OWNED.columns), len(weights_P))
        h_PF = torch.empty_like(dh_PF) if many.blocks else None
        self._by_rows(many, dh_PF, dv_P, weights_P, (h_PF, dgate_up_PG, dweights_SP[0]))
        self._by_owners(few, dh_PF, dv_P, weights_P, (dgate_up_PG, dweights_SP))
        if h_PF is not None:
            many.outer(dv_P * weights_P[:, None], h_PF, self.down_a, scaled=False)
        du_P = torch.zeros_like(self.u_P)
        for part, (name, dy_PF) in enumerate(zip(self.inner_b, dgate_up_PG.chunk(2, dim=1), strict=True)):
            paired.shrink(dy_PF, du_P, name, part=part, scaled=False)
            many.outer(self.u_P, dy_PF, name, part=part, scaled=False)
        return dgate_up_PG, du_P, dweights_SP.sum(0)

    def _by_rows(
        self,
        products: TritonProducts | None,
        dh_PF: Tensor,
        dv_P: Tensor | None,
        weights_P: Tensor,
        results: tuple[Tensor | None, Tensor, Tensor],
    ) -> None:
        """`swiglu_backward` of the rows of these adapters, and first, where some have none, of all: to h_PF (None: not
        wanted), dgate_up_PG and dweights_P."""
        h_PF, *rest = results
        for blocks, where, fixed in self._launches(products):
            tile = BACKWARD.beside(fixed["BLOCK_R"])
            down = (dh_PF, 0, dh_PF)
            if products is not None and dv_P is not None and fixed["ADAPTED"]:
                down = (dv_P, dv_P.stride(0), products.table.weights(self.down_a))
            out = (h_PF if h_PF is not None else dh_PF, *rest)
            fused_kernels.swiglu_backward[blocks,](
                self.gate_up_PG, *where, dh_PF, *down, weights_P, *out, dh_PF.shape[1],
                KEPT=h_PF is not None, **fixed, **tile.fixed,
            )  # fmt: skip

    def _by_owners(
        self,
        products: TritonProducts,
        dh_PF: Tensor,
        dv_P: Tensor,
        weights_P: Tensor,
        results: tuple[Tensor, Tensor],
    ) -> None:
        """To dgate_up_PG, and by tiles of columns to dweights_SP; the factors' gradients are added."""
        assert self.u_P is not None
        table, segments = products.table, products.segments
        names, (dgate_up_PG, dweights_SP) = (*self.inner_b, self.down_a), results
        for each, _ in products.blocks:
            owners = each.owners
            fused_kernels.swiglu_owners_backward[owners.every * segments.num_experts, len(dweights_SP)](
                self.gate_up_PG, self.u_P, self.u_P.stride(0), *map(table.weights, names), *map(table.grads, names),
                table.ranks_G, owners.start, owners.groups, segments.start, owners.every, segments.num_groups,
                dh_PF, dv_P, dv_P.stride(0), weights_P, dgate_up_PG, dweights_SP,
                dweights_SP.stride(0), dh_PF.shape[1], PRECISION=products.precision.name, BLOCK_M=EXPERT_ROWS,
                BLOCK_R=each.block, **OWNED.fixed,
            )  # fmt: skip

    def _launches(self, products: TritonProducts | None) -> Iterator[tuple[int, tuple[Any, ...], dict[str, Any]]]:
        """Of each launch: its blocks, the arguments from `u` to `rows`, and what is compiled into it. Rows without an
        adapter are computed first, with all others where there are both."""
        pairs, nothing = len(self.gate_up_PG), self.gate_up_PG
        if not pairs:
            return
        fixed = {"BLOCK_M": EXPERT_ROWS}
        if products is None or self.u_P is None or not products.table.all_have(self.down_a):
            unused = (nothing, 0, *[nothing] * 6, 1, 1, pairs)
            yield (
                triton.cdiv(pairs, EXPERT_ROWS),
                unused,
                fixed | {"ADAPTED": False, "PRECISION": "ieee", "BLOCK_R": 16},
            )
        if products is None or self.u_P is None:
            return
        table, segments = products.table, products.segments
        gate, up = (table.weights(name) for name in self.inner_b)
        for each, blocks in products.blocks:
            where = (blocks.segment, blocks.first, segments.start, segments.num_experts * segments.num_groups)
            arguments = (self.u_P, self.u_P.stride(0), gate, up, table.ranks_G, *where, segments.num_groups, pairs)
            of = {"ADAPTED": True, "PRECISION": products.precision.name, "BLOCK_R": each.block}
            yield len(blocks.segment), arguments, fixed | of
