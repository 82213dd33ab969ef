"""SwiGLU inside of experts on a device, forward and backward, with the adapters' inner factors in the same pass.

What the base's products give is read once, in the weights' dtype, and never written out in float32: a tile gets its
low-rank parts in float32, is activated, and is rounded once to what the next product of the base takes, which the
adapters' products then take, too. Blocks and ranks are those of kernels.py, so what a segment gets depends on its own
rows alone. Checked in Triton's interpreter.

Shapes: P pairs sorted by expert, F expert width, G = 2F (gate beside up), r rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.model.gpu.kernels import VARYING, _block
from workers.model.gpu.segments import EXPERT_ROWS

if TYPE_CHECKING:
    from workers.model.gpu.launch import TritonProducts

#: Columns of F that a block has at a time.
WIDTH = 64


@triton.jit
def _low_rank(total, u, row, column, factor, rank, wide, own, n, PRECISION: tl.constexpr, BLOCK_R: tl.constexpr):
    """total + u[m, column : column + rank] factor[:, n], whose row m begins at `row`."""
    for start in range(0, rank, BLOCK_R):
        i = start + tl.arange(0, BLOCK_R)
        real = i < rank
        u_mi = tl.load(u + row[:, None] + column + i[None], own[:, None] & real[None], 0.0)
        w_in = tl.load(factor + i[:, None].to(tl.int64) * wide + n[None], real[:, None] & (n < wide)[None], 0.0)
        total = tl.dot(u_mi, w_in, total, input_precision=PRECISION)
    return total


@triton.jit
def _factor(addresses, group, expert, rank, wide):
    return tl.load(addresses + group).to(tl.pointer_type(tl.float32)) + expert.to(tl.int64) * rank * wide


@triton.jit(do_not_specialize=[*VARYING, "rows"])
def swiglu(
    gate_up,
    u,
    stride_u,
    gate_b,
    up_b,
    ranks,
    block_segment,
    first_block,
    segment_start,
    num_segments,
    num_groups,
    rows,
    h,
    wide,
    ADAPTED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """h = silu(gate + u B_gate) * (up + u B_up); not ADAPTED: of all rows, without u."""
    index = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    segment = num_segments * 0
    if ADAPTED:
        segment = tl.load(block_segment + index)
    if segment < num_segments:
        if ADAPTED:
            row, own = _block(segment, first_block, segment_start, index, BLOCK_M)
        else:
            row = index.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
            own = row < rows
        mask = own[:, None] & (n < wide)[None]
        at = gate_up + row[:, None] * (2 * wide) + n[None]
        g = tl.load(at, mask, 0.0).to(tl.float32)
        up = tl.load(at + wide, mask, 0.0).to(tl.float32)
        if ADAPTED:
            group, expert = segment % num_groups, segment // num_groups
            rank = tl.load(ranks + group)
            of_gate, of_up = _factor(gate_b, group, expert, rank, wide), _factor(up_b, group, expert, rank, wide)
            g = _low_rank(g, u, row * stride_u, 0, of_gate, rank, wide, own, n, PRECISION, BLOCK_R)
            up = _low_rank(up, u, row * stride_u, rank, of_up, rank, wide, own, n, PRECISION, BLOCK_R)
        tl.store(h + row[:, None] * wide + n[None], (g * tl.sigmoid(g) * up).to(h.dtype.element_ty), mask)


@triton.jit(do_not_specialize=[*VARYING, "rows"])
def swiglu_backward(
    gate_up,
    u,
    stride_u,
    gate_b,
    up_b,
    ranks,
    block_segment,
    first_block,
    segment_start,
    num_segments,
    num_groups,
    rows,
    dh,
    dv,
    stride_dv,
    down_a,
    weights,
    h,
    dgate_up,
    dweights,
    wide,
    ADAPTED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Of dh + dv A_down, the gradient of h before the router's weight: h again, d(gate, up) behind that weight, and the
    weight's own gradient, the sum of dh * h over the row."""
    index = tl.program_id(0)
    segment = num_segments * 0
    if ADAPTED:
        segment = tl.load(block_segment + index)
    if segment < num_segments:
        if ADAPTED:
            row, own = _block(segment, first_block, segment_start, index, BLOCK_M)
            group, expert = segment % num_groups, segment // num_groups
            rank = tl.load(ranks + group)
            of_gate, of_up = _factor(gate_b, group, expert, rank, wide), _factor(up_b, group, expert, rank, wide)
            of_down = _factor(down_a, group, expert, rank, wide)
        else:
            row = index.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
            own = row < rows
        weight = tl.load(weights + row, own, 0.0)[:, None]
        total = tl.full((BLOCK_M,), 0.0, tl.float32)
        for start in range(0, wide, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            mask = own[:, None] & (n < wide)[None]
            at = row[:, None] * (2 * wide) + n[None]
            g = tl.load(gate_up + at, mask, 0.0).to(tl.float32)
            up = tl.load(gate_up + at + wide, mask, 0.0).to(tl.float32)
            d = tl.load(dh + row[:, None] * wide + n[None], mask, 0.0).to(tl.float32)
            if ADAPTED:
                g = _low_rank(g, u, row * stride_u, 0, of_gate, rank, wide, own, n, PRECISION, BLOCK_R)
                up = _low_rank(up, u, row * stride_u, rank, of_up, rank, wide, own, n, PRECISION, BLOCK_R)
                d = _low_rank(d, dv, row * stride_dv, 0, of_down, rank, wide, own, n, PRECISION, BLOCK_R)
            sigmoid = tl.sigmoid(g)
            silu = g * sigmoid
            active = silu * up
            total += tl.sum(d * active, 1)
            d *= weight
            tl.store(h + row[:, None] * wide + n[None], active.to(h.dtype.element_ty), mask)
            dgate = d * up * sigmoid * (1 + g * (1 - sigmoid))
            tl.store(dgate_up + at, dgate.to(dgate_up.dtype.element_ty), mask)
            tl.store(dgate_up + at + wide, (d * silu).to(dgate_up.dtype.element_ty), mask)
        tl.store(dweights + row, total, own)


class Inside(NamedTuple):
    """What `activate` is given and its backward again: base's products of gate and up [P, G], and u = scale * x A^T of
    the adapters [P, >= 2r] with their products and the names of their factors."""

    gate_up_PG: Tensor
    u_P: Tensor | None
    paired: TritonProducts | None
    inner_b: tuple[str, ...]
    down_a: str

    def activate(self) -> Tensor:
        """h_PF = silu(gate) * up, of gate and up with their low-rank parts, in the dtype of `gate_up_PG`."""
        pairs, wide = len(self.gate_up_PG), self.gate_up_PG.shape[1] // 2
        h_PF = self.gate_up_PG.new_empty(pairs, wide)
        for blocks, where, fixed in self._launches():
            swiglu[blocks, triton.cdiv(wide, WIDTH)](self.gate_up_PG, *where, h_PF, wide, **fixed)
        return h_PF

    def backward(self, dh_PF: Tensor, dv_P: Tensor | None, weights_P: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the gradient of h before the router's weight, without the part dv A that the adapters have in it: h_PF,
        dgate_up_PG behind that weight, and dweights_P."""
        h_PF, dgate_up_PG = torch.empty_like(dh_PF), torch.empty_like(self.gate_up_PG)
        dweights_P = torch.empty_like(weights_P)
        for blocks, where, fixed in self._launches():
            down = (dh_PF, 0, dh_PF)
            if fixed["ADAPTED"] and dv_P is not None and self.paired is not None:
                down = (dv_P, dv_P.stride(0), self.paired.table.weights(self.down_a))
            results = (h_PF, dgate_up_PG, dweights_P)
            swiglu_backward[blocks,](
                self.gate_up_PG, *where, dh_PF, *down, weights_P, *results, dh_PF.shape[1], **fixed
            )  # fmt: skip
        return h_PF, dgate_up_PG, dweights_P

    def _launches(self) -> Iterator[tuple[int, tuple[Any, ...], dict[str, Any]]]:
        """Of each launch: its blocks, the arguments from `u` to `rows`, and what is compiled into it. Rows without an
        adapter are computed first, with all others where there are both."""
        pairs, products, nothing = len(self.gate_up_PG), self.paired, self.gate_up_PG
        if not pairs:
            return
        fixed = {"BLOCK_M": EXPERT_ROWS, "BLOCK_N": WIDTH}
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
