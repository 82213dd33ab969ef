"""Triton kernels of log-probabilities (softmax.py, which says the shapes): of logits with what adapters add to them,
which is nowhere written. What a row gets depends on its own numbers alone. Checked in Triton's interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from workers.model.gpu.fused_kernels import rows_of
from workers.model.gpu.kernels import VARYING, _beside_held, _factor, _held, _low_rank


@triton.jit
def _logits(
    logits, stride, u, stride_u, factors, ranks, scales, group, divisors, row, own, n, wide,
    ADAPTED: tl.constexpr, DIVIDED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """A tile of (logits + scale * u B) / divisor; not ADAPTED without u, not DIVIDED as it is."""
    x = tl.load(logits + row[:, None] * stride + n[None], own[:, None] & (n < wide)[None], 0.0)
    if ADAPTED:
        rank = tl.load(ranks + group)
        factor, scale = _factor(factors, group, group * 0, rank, wide), tl.load(scales + group)
        x = _low_rank(x, u + row * stride_u, factor, rank, scale, wide, own, n, PRECISION, BLOCK_R)
    if DIVIDED:
        x = x / tl.load(divisors + row, own, 1.0)[:, None]
    return x


@triton.jit(do_not_specialize=[*VARYING, "rows"])
def log_sum(
    logits,
    stride,
    u,
    stride_u,
    factors,
    ranks,
    scales,
    block_segment,
    first_block,
    segment_start,
    num_segments,
    num_groups,
    divisors,
    rows,
    wide,
    sums,
    ADAPTED: tl.constexpr,
    HELD: tl.constexpr,
    DIVIDED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """sums[s, r] = the log of the sum of exp((logits[r] + scale * u[r] B) / divisor) over columns s * SPLIT to
    (s + 1) * SPLIT, against the largest so far (arXiv 1805.02867)."""
    index = tl.program_id(0)
    segment = num_segments * 0
    if ADAPTED:
        segment = tl.load(block_segment + index)
    if segment < num_segments:
        row, own = rows_of(segment, first_block, segment_start, index, rows, ADAPTED, BLOCK_M)
        most, total = tl.full((BLOCK_M,), -float("inf"), tl.float32), tl.full((BLOCK_M,), 0.0, tl.float32)
        if HELD:
            rank = tl.load(ranks + segment)
            w = _factor(factors, segment, segment * 0, rank, wide)
            held = _held(u + row * stride_u, rank, tl.load(scales + segment), own, BLOCK_R)
        for start in range(0, SPLIT, BLOCK_N):
            n = tl.program_id(1) * SPLIT + start + tl.arange(0, BLOCK_N)
            if HELD:
                x = tl.load(logits + row[:, None] * stride + n[None], own[:, None] & (n < wide)[None], 0.0)
                x = _beside_held(x, held, w, rank, wide, n, PRECISION, BLOCK_R)
                if DIVIDED:
                    x = x / tl.load(divisors + row, own, 1.0)[:, None]
            else:
                x = _logits(
                    logits, stride, u, stride_u, factors, ranks, scales, segment, divisors, row, own, n, wide,
                    ADAPTED, DIVIDED, PRECISION, BLOCK_R,
                )  # fmt: skip
            x = tl.where((n < wide)[None], x, -float("inf"))
            higher = tl.maximum(most, tl.max(x, 1))
            total = total * tl.exp(most - higher) + tl.sum(tl.exp(x - higher[:, None]), 1)
            most = higher
        tl.store(sums + tl.program_id(1).to(tl.int64) * rows + row, most + tl.log(total), own)


@triton.jit(do_not_specialize=[*VARYING, "rows"])
def log_sum_backward(
    logits,
    stride,
    u,
    stride_u,
    factors,
    ranks,
    scales,
    block_segment,
    first_block,
    segment_start,
    num_segments,
    num_groups,
    divisors,
    rows,
    wide,
    sums,
    dsums,
    dlogits,
    ADAPTED: tl.constexpr,
    DIVIDED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The gradient of `logits` where dsums[r] is that of the log of the sum over all columns, sums[r]."""
    index = tl.program_id(0)
    segment = num_segments * 0
    if ADAPTED:
        segment = tl.load(block_segment + index)
    if segment < num_segments:
        row, own = rows_of(segment, first_block, segment_start, index, rows, ADAPTED, BLOCK_M)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        x = _logits(
            logits, stride, u, stride_u, factors, ranks, scales, segment, divisors, row, own, n, wide,
            ADAPTED, DIVIDED, PRECISION, BLOCK_R,
        )  # fmt: skip
        d = tl.load(dsums + row, own, 0.0)
        if DIVIDED:
            d /= tl.load(divisors + row, own, 1.0)
        dx = d[:, None] * tl.exp(x - tl.load(sums + row, own, 0.0)[:, None])
        at = dlogits + row[:, None] * wide + n[None]
        tl.store(at, dx.to(dlogits.dtype.element_ty), own[:, None] & (n < wide)[None])


@triton.jit
def at_targets(
    logits, stride, u, stride_u, factors, ranks, scales, group_of_row, divisors, wide, row_of, targets, found,
    ADAPTED: tl.constexpr, DIVIDED: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """found[p] = x[row_of[p], targets[p]] of the x that `log_sum` adds up."""
    row, target = tl.load(row_of + tl.program_id(0)), tl.load(targets + tl.program_id(0))
    x = tl.load(logits + row * stride + target)
    if ADAPTED:
        group = tl.load(group_of_row + row)
        address = tl.load(factors + group)
        rank = tl.where(address == 0, 0, tl.load(ranks + group))
        w = address.to(tl.pointer_type(tl.float32)) + target
        total = tl.full((BLOCK_R,), 0.0, tl.float32)
        for start in range(0, rank, BLOCK_R):
            i = start + tl.arange(0, BLOCK_R)
            total += tl.load(u + row * stride_u + i, i < rank, 0.0) * tl.load(w + i * wide, i < rank, 0.0)
        x += tl.load(scales + group) * tl.sum(total, 0)
    if DIVIDED:
        x /= tl.load(divisors + row)
    tl.store(found + tl.program_id(0), x)


@triton.jit
def at_targets_backward(
    logprobs, dlogprobs, row_of, targets, first, dsums, divisors, dlogits, wide,
    DIVIDED: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Where `log_sum_backward` has left only its part, at the targets: theirs, too, added up before it is rounded.
    Targets of row r are first[r]:first[r + 1]; a target that a row has more than once gets all of it each time."""
    row, target = tl.load(row_of + tl.program_id(0)), tl.load(targets + tl.program_id(0))
    dx = tl.load(dsums + row) * tl.exp(tl.load(logprobs + tl.program_id(0)))
    last = tl.load(first + row + 1)
    for start in range(tl.load(first + row), last, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        same = (p < last) & (tl.load(targets + p, p < last, -1) == target)
        dx += tl.sum(tl.load(dlogprobs + p, same, 0.0), 0)
    if DIVIDED:
        dx /= tl.load(divisors + row)
    tl.store(dlogits + row * wide + target, dx.to(dlogits.dtype.element_ty))
