"""Triton kernels of a decode step's attention: each row's query over the pages of its own sequence, read in place.

    store    write the new key and value of every row to their place in the pages
    partial  softmax(q k) v over some consecutive pages of a row, with what is needed to add parts up
    combine  add up the parts of a row, first to last

Programs are laid out by what is fixed for a captured step (rows, heads, SPLITS); lengths and pages are read on the
device, so launches can be captured. The queries that share a kv head are one product. Sums are float32.

Invariant (isolation): a row's parts follow from its own length alone, and are added in order, so its result does not
depend on the other rows of the step. Launched by attend.py; checked in Triton's interpreter.

Arguments: `table_RW` int32 [R, width] the pages of each row, `positions_R` int64 [R] its newest position. k_NKDP and
v_NKPD are the cache's N pages, keys and values in the cache's dtype.

Shapes: R rows, W pages of the longest row at most, H query heads, K kv heads, G = H / K, D head dim, P positions of a
page, S = SPLITS parts.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store(
    k_new,
    stride_k,
    v_new,
    stride_v,
    k_NKDP,
    v_NKPD,
    table_RW,
    positions_R,
    width,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """k_NKDP[page, head, :, offset] = k_new[row, head] and v_NKPD[page, head, offset] = v_new[row, head], for the page
    and the offset of the row's newest position. Grid: rows, kv heads."""
    row, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions_R + row)
    page = tl.load(table_RW + row * width + position // PAGE).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    real = d < DIM
    base = (page * HEADS + head) * DIM * PAGE
    k = tl.load(k_new + row.to(tl.int64) * stride_k + head * DIM + d, real)
    v = tl.load(v_new + row.to(tl.int64) * stride_v + head * DIM + d, real)
    tl.store(k_NKDP + base + d * PAGE + position % PAGE, k, real)
    tl.store(v_NKPD + base + position % PAGE * DIM + d, v, real)


@triton.jit
def _pages_of_part(position, PAGE: tl.constexpr, SPLITS: tl.constexpr, MIN_PAGES: tl.constexpr):
    """How many pages a row has, and how many of them make one part."""
    pages = (position // PAGE + 1).to(tl.int32)
    return pages, tl.maximum(MIN_PAGES, (pages + SPLITS - 1) // SPLITS)


@triton.jit
def _first_page(position, PAGE: tl.constexpr, WINDOW: tl.constexpr):
    """The first page that a row attends to: pages before its window are not read. WINDOW 0: no window."""
    first = position * 0
    if WINDOW:
        first = tl.maximum(position + 1 - WINDOW, 0) // PAGE
    return first.to(tl.int32)


@triton.jit
def partial(
    q_RHD,
    stride_q,
    k_NKDP,
    v_NKPD,
    table_RW,
    positions_R,
    width,
    scale_log2,
    sums_RHSD,
    tops_RHS,
    masses_RHS,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_PAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One part of a row for the G queries of one kv head, each float32: top = the largest score, where scores are q k
    times `scale_log2` (log2(e) / sqrt(D)); mass = sum of 2^(score - top); sum = sum of 2^(score - top) v. Writes
    nothing for a part beyond the row's pages. Grid: rows, kv heads, parts."""
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions_R + row)
    pages, each = _pages_of_part(position, PAGE, SPLITS, MIN_PAGES)
    first = part * each
    if first < pages:
        g, d, p = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, PAGE)
        own, real = g < GROUPS, d < DIM
        query = head * GROUPS + g
        at = q_RHD + row.to(tl.int64) * stride_q + query[:, None] * DIM + d[None]
        q_GD = tl.load(at, own[:, None] & real[None], 0.0).to(tl.float32)
        top_G = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        mass_G = tl.full((BLOCK_G,), 0.0, tl.float32)
        sum_GD = tl.full((BLOCK_G, BLOCK_D), 0.0, tl.float32)
        for n in range(tl.maximum(first, _first_page(position, PAGE, WINDOW)), tl.minimum(first + each, pages)):
            page = tl.load(table_RW + row * width + n).to(tl.int64)
            base = (page * HEADS + head) * DIM * PAGE
            seen = n * PAGE + p <= position
            if WINDOW:
                seen = seen & (n * PAGE + p > position - WINDOW)
            # A mask along neighbours would keep keys from being read as vectors; their scores are masked below.
            k_DP = tl.load(k_NKDP + base + d[:, None] * PAGE + p[None], real[:, None], 0.0)
            v_PD = tl.load(v_NKPD + base + p[:, None] * DIM + d[None], seen[:, None] & real[None], 0.0)
            scores_GP = tl.dot(q_GD, k_DP.to(tl.float32), input_precision=PRECISION) * scale_log2
            scores_GP = tl.where(seen[None], scores_GP, float("-inf"))
            higher_G = tl.maximum(top_G, tl.max(scores_GP, 1))
            weights_GP = tl.exp2(scores_GP - higher_G[:, None])
            shrunk_G = tl.exp2(top_G - higher_G)
            mass_G = mass_G * shrunk_G + tl.sum(weights_GP, 1)
            sum_GD = sum_GD * shrunk_G[:, None]
            sum_GD = tl.dot(weights_GP, v_PD.to(tl.float32), sum_GD, input_precision=PRECISION)
            top_G = higher_G
        to = (row.to(tl.int64) * HEADS * GROUPS + query) * SPLITS + part
        tl.store(tops_RHS + to, top_G, own)
        tl.store(masses_RHS + to, mass_G, own)
        tl.store(sums_RHSD + to[:, None] * DIM + d[None], sum_GD, own[:, None] & real[None])


@triton.jit
def combine(
    sums_RHSD,
    tops_RHS,
    masses_RHS,
    positions_R,
    sinks_H,
    out_RHD,
    ALL_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_PAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out[row, head] = (sum over parts of 2^(top - highest) * sum) / (sum over parts of 2^(top - highest) * mass),
    where `highest` is the largest top. If SINKS, the denominator also has 2^(sink * log2(e) - highest), and `highest`
    includes the sink. Grid: rows, query heads."""
    row, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions_R + row)
    pages, each = _pages_of_part(position, PAGE, SPLITS, MIN_PAGES)
    first = _first_page(position, PAGE, WINDOW) // each
    d = tl.arange(0, BLOCK_D)
    real = d < DIM
    at = row.to(tl.int64) * ALL_HEADS + head
    top = tl.load(tops_RHS + at * SPLITS + first)
    mass = tl.load(masses_RHS + at * SPLITS + first)
    sum_D = tl.load(sums_RHSD + (at * SPLITS + first) * DIM + d, real, 0.0)
    for part in range(first + 1, (pages + each - 1) // each):
        other = tl.load(tops_RHS + at * SPLITS + part)
        higher = tl.maximum(top, other)
        kept, added = tl.exp2(top - higher), tl.exp2(other - higher)
        mass = mass * kept + tl.load(masses_RHS + at * SPLITS + part) * added
        sum_D = sum_D * kept + tl.load(sums_RHSD + (at * SPLITS + part) * DIM + d, real, 0.0) * added
        top = higher
    if SINKS:
        sink = tl.load(sinks_H + head).to(tl.float32) * 1.4426950408889634
        higher = tl.maximum(top, sink)
        kept = tl.exp2(top - higher)
        mass = mass * kept + tl.exp2(sink - higher)
        sum_D = sum_D * kept
    tl.store(out_RHD + at * DIM + d, (sum_D / mass).to(out_RHD.dtype.element_ty), real)
