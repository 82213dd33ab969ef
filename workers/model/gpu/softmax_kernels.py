"""Triton kernels of log-probabilities, launched by softmax.py, which states the shapes. Logits with what adapters add
to them are computed tile by tile, and never written to memory.

Invariant (isolation): a row's results depend on its own numbers alone. Checked in Triton's interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from workers.model.gpu.fused_kernels import rows_of
from workers.model.gpu.kernels import VARYING, _factor, _held, _low_rank


@triton.jit
def _logits(
    logits, stride, u_m, factors, ranks, scales, group, divisors, row, own, n, wide,
    ADAPTED: tl.constexpr, DIVIDED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_R: tl.constexpr,
    HELD: tl.constexpr = False,
):  # fmt: skip
    """A tile of (logits + scale * u B) / divisor, float32; without u if not ADAPTED, undivided if not DIVIDED."""
    x = tl.load(logits + row[:, None] * stride + n[None], own[:, None] & (n < wide)[None], 0.0)
    if ADAPTED:
        rank = tl.load(ranks + group)
        factor, scale = _factor(factors, group, group * 0, rank, wide), tl.load(scales + group)
        x = _low_rank(x, u_m, factor, rank, scale, wide, own, n, PRECISION, BLOCK_R, HELD)
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
    """sums[s, r] = log of the sum of exp(x) over the columns from s * SPLIT to (s + 1) * SPLIT, where x = (logits[r] +
    scale * u[r] B) / divisor. In one pass: each sum is kept relative to the largest x so far (arXiv 1805.02867).

    logits float32 [rows, wide], sums float32 [splits, rows]. HELD: one block holds all ranks. Grid: blocks of rows,
    splits."""
    index = tl.program_id(0)
    segment = num_segments * 0
    if ADAPTED:
        segment = tl.load(block_segment + index)
    if segment < num_segments:
        row, own = rows_of(segment, first_block, segment_start, index, rows, ADAPTED, BLOCK_M)
        most, total = tl.full((BLOCK_M,), -float("inf"), tl.float32), tl.full((BLOCK_M,), 0.0, tl.float32)
        u_m = u + row * stride_u
        if ADAPTED:
            u_m = _held(u_m, tl.load(ranks + segment), tl.load(scales + segment), own, BLOCK_R, HELD)
        for start in range(0, SPLIT, BLOCK_N):
            n = tl.program_id(1) * SPLIT + start + tl.arange(0, BLOCK_N)
            x = _logits(
                logits, stride, u_m, factors, ranks, scales, segment, divisors, row, own, n, wide,
                ADAPTED, DIVIDED, PRECISION, BLOCK_R, HELD,
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
    """dlogits[r] = dsums[r] exp(x - sums[r]) / divisor: the gradient of `logits`, if dsums[r] is the gradient of
    sums[r], the log of the sum over all columns. Rounded once to the dtype of dlogits [rows, wide]."""
    index = tl.program_id(0)
    segment = num_segments * 0
    if ADAPTED:
        segment = tl.load(block_segment + index)
    if segment < num_segments:
        row, own = rows_of(segment, first_block, segment_start, index, rows, ADAPTED, BLOCK_M)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        x = _logits(
            logits, stride, u + row * stride_u, factors, ranks, scales, segment, divisors, row, own, n, wide,
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
    """found[p] = x[row_of[p], targets[p]], for the same x as in `log_sum`. One program per target p."""
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
    """Overwrite the gradient at the targets, where `log_sum_backward` has left only its own part: dsums exp(logprob)
    plus the gradients of all targets that are the same number in the same row, added in float32 and rounded once. The
    targets of row r are first[r]:first[r + 1]; if a row has a target twice, both programs write the same sum."""
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
