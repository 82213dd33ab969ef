"""Triton kernels of the low-rank products, for many adapters in one launch ("virtual experts": group x expert).

Every factor lies in memory as [rows, wide], a few rows (the rank, or a multiple of it where factors are stacked) over
the long side. So three kernels are the whole of LoRA, dense and in experts, forward and backward:

    shrink   u = x W^T                 x A^T forward,  dy B^T backward
    expand   y += scale * u W          u B forward,    du A backward
    outer    dW += scale * u^T y       the gradients of B and of A

Factors are found by address, one int64 per group, so adapters are neither stacked nor copied and ranks may be mixed.
A segment is the consecutive rows of one expert and one group, number expert * num_groups + group; a dense product has
one expert. No block holds rows of two segments, sums are split at fixed places if at all, and there are no atomics:
what a segment gets depends on its own rows alone. Sums are kept in float32. Launched by launch.py; checked in Triton's
interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _block(segment, first_block, segment_start, index, BLOCK_M: tl.constexpr):
    """Rows of block `index`, and which of them belong to the segment."""
    row = tl.load(segment_start + segment) + (index - tl.load(first_block + segment)) * BLOCK_M + tl.arange(0, BLOCK_M)
    return row.to(tl.int64), row < tl.load(segment_start + segment + 1)


@triton.jit
def _factor(addresses, group, expert, count, wide):
    """A group's factor for an expert, of `count` rows. Tensors of an arena begin at cache lines: numbers of a row come
    as vectors."""
    first = tl.multiple_of(tl.load(addresses + group).to(tl.pointer_type(tl.float32)), 16)
    return first + expert.to(tl.int64) * count * wide


@triton.jit
def _low_rank(total, u_m, w, count, scale, wide, own, n, PRECISION: tl.constexpr, BLOCK_R: tl.constexpr):
    """total + sum over i < count of scale u_m[m][i] w[i, n], where u_m points to each row. As a rule one block of ranks
    is all: there is nothing to fetch ahead."""
    for start in tl.range(0, count, BLOCK_R, num_stages=1):
        i = start + tl.arange(0, BLOCK_R)
        real = i < count
        u_mi = tl.load(u_m[:, None] + i[None], own[:, None] & real[None], 0.0) * scale
        w_in = tl.load(w + i[:, None].to(tl.int64) * wide + n[None], real[:, None] & (n < wide)[None], 0.0)
        total = tl.dot(u_mi, w_in, total, input_precision=PRECISION)
    return total


@triton.jit
def _held(u_m, count, scale, own, BLOCK_R: tl.constexpr):
    """scale u_m[m][i] of all i < count, at most BLOCK_R, to stay in registers while columns pass."""
    i = tl.arange(0, BLOCK_R)
    return tl.load(u_m[:, None] + i[None], own[:, None] & (i < count)[None], 0.0) * scale


@triton.jit
def _beside_held(total, held, w, count, wide, n, PRECISION: tl.constexpr, BLOCK_R: tl.constexpr):
    """`_low_rank` with u that is `_held`."""
    i = tl.arange(0, BLOCK_R)
    w_in = tl.load(w + i[:, None] * wide + n[None], (i < count)[:, None] & (n < wide)[None], 0.0)
    return tl.dot(held, w_in, total, input_precision=PRECISION)


#: Arguments that change with the batch; specialised, Triton would compile again for 1 and for multiples of 16.
VARYING = ["num_segments", "num_groups", "part"]


@triton.jit(do_not_specialize=[*VARYING, "stride_split"])
def shrink(
    x,
    stride_x,
    u,
    stride_u,
    stride_split,
    addresses,
    ranks,
    scales,
    block_segment,
    first_block,
    segment_start,
    num_segments,
    num_groups,
    wide,
    part,
    STACK: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """u[s, m, part * rank + i] = x[m] . W[i] over columns s * SPLIT to (s + 1) * SPLIT, for i < STACK * rank, times the
    group's scale if SCALED."""
    index = tl.program_id(0)
    segment = tl.load(block_segment + index)
    if segment < num_segments:
        group, expert = segment % num_groups, segment // num_groups
        rank = tl.load(ranks + group)
        i = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        real = i < STACK * rank
        w = _factor(addresses, group, expert, STACK * rank, wide)
        row, own = _block(segment, first_block, segment_start, index, BLOCK_M)
        total = tl.full((BLOCK_M, BLOCK_R), 0.0, tl.float32)
        for start in range(0, SPLIT, BLOCK_K):
            k = tl.program_id(2) * SPLIT + start + tl.arange(0, BLOCK_K)
            x_mk = tl.load(x + row[:, None] * stride_x + k[None], own[:, None] & (k < wide)[None], 0.0)
            w_ki = tl.load(w + i[None].to(tl.int64) * wide + k[:, None], real[None] & (k < wide)[:, None], 0.0)
            total = tl.dot(x_mk.to(tl.float32), w_ki, total, input_precision=PRECISION)
        if SCALED:
            total = total * tl.load(scales + group)
        u += tl.program_id(2).to(tl.int64) * stride_split
        tl.store(u + row[:, None] * stride_u + part * rank + i[None], total, own[:, None] & real[None])


@triton.jit(do_not_specialize=VARYING)
def expand(
    y,
    stride_y,
    u,
    stride_u,
    addresses,
    ranks,
    scales,
    block_segment,
    first_block,
    segment_start,
    num_segments,
    num_groups,
    wide,
    part,
    STACK: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """y[m, n] += sum over i < STACK * rank of u[m, part * rank + i] W[i, n], times the group's scale if SCALED."""
    index = tl.program_id(0)
    segment = tl.load(block_segment + index)
    if segment < num_segments:
        group, expert = segment % num_groups, segment // num_groups
        rank = tl.load(ranks + group)
        w = _factor(addresses, group, expert, STACK * rank, wide)
        row, own = _block(segment, first_block, segment_start, index, BLOCK_M)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        at, mask = y + row[:, None] * stride_y + n[None], own[:, None] & (n < wide)[None]
        total = tl.load(at, mask, 0.0).to(tl.float32)
        factor = tl.load(scales + group) if SCALED else 1.0
        u_m = u + row * stride_u + part * rank
        total = _low_rank(total, u_m, w, STACK * rank, factor, wide, own, n, PRECISION, BLOCK_R)
        tl.store(at, total.to(y.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["num_owners", "num_groups", "part"])
def outer(
    u,
    stride_u,
    y,
    stride_y,
    addresses,
    ranks,
    scales,
    owner_start,
    owner_groups,
    segment_start,
    num_owners,
    num_groups,
    wide,
    part,
    STACK: tl.constexpr,
    SCALED: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dW[i, n] += sum over the rows m of u[m, part * rank + i] y[m, n], times the group's scale if SCALED.

    One owner is one gradient arena: groups owner_groups[owner_start[o]:owner_start[o + 1]] add to it in that order, as
    they would in launches of their own."""
    owner, expert = tl.program_id(0) % num_owners, tl.program_id(0) // num_owners
    first, last = tl.load(owner_start + owner), tl.load(owner_start + owner + 1)
    group = tl.load(owner_groups + first)
    rank = tl.load(ranks + group)
    rows = tl.load(owner_start) * 0
    for at in range(first, last):
        segment = expert * num_groups + tl.load(owner_groups + at)
        rows += tl.load(segment_start + segment + 1) - tl.load(segment_start + segment)
    i = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    if (rows > 0) & (tl.program_id(2) * BLOCK_R < STACK * rank):
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        real, inside = i < STACK * rank, n < wide
        w = _factor(addresses, group, expert, STACK * rank, wide)
        dw, mask = w + i[:, None].to(tl.int64) * wide + n[None], real[:, None] & inside[None]
        dw_in = tl.load(dw, mask, 0.0)
        for at in range(first, last):
            group = tl.load(owner_groups + at)
            segment = expert * num_groups + group
            start, stop = tl.load(segment_start + segment), tl.load(segment_start + segment + 1)
            total = tl.full((BLOCK_R, BLOCK_N), 0.0, tl.float32)
            for begin in tl.range(start, stop, BLOCK_M, num_stages=STAGES):
                row = begin + tl.arange(0, BLOCK_M).to(tl.int64)
                own = row < stop
                u_im = tl.load(u + row[None] * stride_u + part * rank + i[:, None], real[:, None] & own[None], 0.0)
                y_mn = tl.load(y + row[:, None] * stride_y + n[None], own[:, None] & inside[None], 0.0)
                total = tl.dot(u_im, y_mn.to(tl.float32), total, input_precision=PRECISION)
            if SCALED:
                total = total * tl.load(scales + group)
            dw_in += total
        tl.store(dw, dw_in, mask)


@triton.jit(do_not_specialize=["num_experts"])
def experts(
    x,
    stride_x,
    weight,
    stride_e,
    stride_n,
    stride_k,
    y,
    stride_y,
    block_expert,
    first_block,
    ends,
    num_experts,
    inner,
    wide,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y[m, n] = sum over k of x[m, k] weight[e, n, k], for the expert e of row m; sums in float32."""
    index = tl.program_id(0)
    expert = tl.load(block_expert + index)
    if expert < num_experts:
        start = tl.load(ends + expert - 1, expert > 0, 0).to(tl.int64)
        row = start + (index - tl.load(first_block + expert)) * BLOCK_M + tl.arange(0, BLOCK_M)
        own = row < tl.load(ends + expert)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = n < wide
        w = weight + expert.to(tl.int64) * stride_e
        total = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
        for begin in range(0, inner, BLOCK_K):
            k = begin + tl.arange(0, BLOCK_K)
            x_mk = tl.load(x + row[:, None] * stride_x + k[None], own[:, None] & (k < inner)[None], 0.0)
            at = w + n[None].to(tl.int64) * stride_n + k[:, None].to(tl.int64) * stride_k
            w_kn = tl.load(at, (k < inner)[:, None] & inside[None], 0.0)
            total = tl.dot(x_mk, w_kn, total, input_precision="ieee")
        tl.store(y + row[:, None] * stride_y + n[None], total.to(y.dtype.element_ty), own[:, None] & inside[None])


@triton.jit(do_not_specialize=["num_experts", "most"])
def expert_blocks(
    ends,
    block_expert,
    first_block,
    num_experts,
    most,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Which expert each of the `most` blocks of at most BLOCK_M rows belongs to, num_experts where there is nothing to
    do, and each expert's first block: of rows that end at ends[e]. BLOCK_E is at least num_experts."""
    e = tl.arange(0, BLOCK_E)
    rows = tl.load(ends + e, e < num_experts, 0) - tl.load(ends + e - 1, (e > 0) & (e < num_experts), 0)
    needed = (rows + BLOCK_M - 1) // BLOCK_M
    after = tl.cumsum(needed, 0)
    if tl.program_id(0) == 0:
        tl.store(first_block + e, after - needed, e < num_experts)
    index = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    expert = tl.sum(((after[None] <= index[:, None]) & (e < num_experts)[None]).to(tl.int32), 1)
    tl.store(block_expert + index, expert, index < most)


@triton.jit(do_not_specialize=["pairs", "choices", "num_experts"])
def sort_pairs(
    chosen,
    experts,
    order,
    inverse,
    token,
    ends,
    pairs,
    choices,
    num_experts,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """What Routing is made of, for few pairs: the place of each is counted, in blocks of BLOCK that compare it with all
    others. BLOCK_P is at least `pairs`."""
    every = tl.arange(0, BLOCK_P)
    other = tl.load(chosen + every, every < pairs, 1 << 30)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(chosen + pair, pair < pairs, 1 << 30)
    before = (other[None] < own[:, None]) | ((other[None] == own[:, None]) & (every[None] < pair[:, None]))
    at = tl.sum(before.to(tl.int32), 1)
    tl.store(experts + at, own, pair < pairs)
    tl.store(order + at, pair.to(tl.int64), pair < pairs)
    tl.store(inverse + pair, at.to(tl.int64), pair < pairs)
    tl.store(token + at, (pair // choices).to(tl.int64), pair < pairs)
    # The blocks have an expert each, too, and take turns.
    tl.store(ends + pair, tl.sum((other[None] <= pair[:, None]).to(tl.int32), 1), pair < num_experts)
