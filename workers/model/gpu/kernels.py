"""Triton kernels of the low-rank products, for many adapters in one launch: a block of rows belongs to one group and
one expert ("virtual experts").

A factor W is float32 [count, wide] in memory: `count` is the rank (STACK times the rank if factors are stacked), `wide`
the long side. So three kernels compute all of LoRA, dense and in experts, forward and backward:

    shrink   u = x W^T                 x A^T forward,  dy B^T backward
    expand   y += scale * u W          u B forward,    du A backward
    outer    dW += scale * u^T y       the gradients of B and of A

Arguments that they share:

    addresses        int64 [G]: where the factor of each group begins; adapters are neither stacked nor copied
    ranks, scales    int64 [G], float32 [G]: of each group's adapter; ranks may differ
    u, stride_u      float32 [rows, columns], and the distance of its rows; a part begins at column part * rank
    block_segment, first_block, segment_start    int64: `segment` and `first` of `Blocks`, `start` of `Segments`
    num_segments, num_groups                     R and G of segments.py

A segment is the consecutive rows of one expert and one group; its number is expert * num_groups + group. A dense
product has one expert.

Invariant (isolation): a segment's results depend on its own rows alone. No block holds rows of two segments, sums are
split at fixed columns if at all, and nothing is added atomically. Sums are float32. Launched by launch.py; checked in
Triton's interpreter.

Indices in names: m rows, i ranks, k columns that are summed over, n columns of the result.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _block(segment, first_block, segment_start, index, BLOCK_M: tl.constexpr):
    """The row numbers of block `index`, int64 [BLOCK_M], and a mask of those that lie in the segment."""
    row = tl.load(segment_start + segment) + (index - tl.load(first_block + segment)) * BLOCK_M + tl.arange(0, BLOCK_M)
    return row.to(tl.int64), row < tl.load(segment_start + segment + 1)


@triton.jit
def _factor(addresses, group, expert, count, wide):
    """A pointer to the factor [count, wide] of a group and an expert. An adapter's tensors begin at cache lines, which
    Triton is told (`multiple_of`), so that it reads a row as vectors."""
    first = tl.multiple_of(tl.load(addresses + group).to(tl.pointer_type(tl.float32)), 16)
    return first + expert.to(tl.int64) * count * wide


@triton.jit
def _held(u_m, count, scale, own, BLOCK_R: tl.constexpr, HELD: tl.constexpr):
    """What `_low_rank` takes for the same HELD. If HELD, scale * u_m[m][i] for all i < count, count at most BLOCK_R:
    read once, and kept in registers for all columns. Else `u_m`."""
    if HELD:
        i = tl.arange(0, BLOCK_R)
        u_m = tl.load(u_m[:, None] + i[None], own[:, None] & (i < count)[None], 0.0) * scale
    return u_m


@triton.jit
def _low_rank(
    total, u_m, w, count, scale, wide, own, n,
    PRECISION: tl.constexpr, BLOCK_R: tl.constexpr, HELD: tl.constexpr = False,
):  # fmt: skip
    """total[m, n] + sum over i < count of scale * u_m[m][i] * w[i, n], float32. `u_m` points to the first rank of each
    row; if HELD, it is what `_held` has read. `own` masks rows. As a rule one block holds all ranks, so nothing is
    fetched ahead (`num_stages=1`)."""
    if HELD:
        i = tl.arange(0, BLOCK_R)
        w_in = tl.load(w + i[:, None] * wide + n[None], (i < count)[:, None] & (n < wide)[None], 0.0)
        total = tl.dot(u_m, w_in, total, input_precision=PRECISION)
    else:
        for start in tl.range(0, count, BLOCK_R, num_stages=1):
            i = start + tl.arange(0, BLOCK_R)
            real = i < count
            u_mi = tl.load(u_m[:, None] + i[None], own[:, None] & real[None], 0.0) * scale
            w_in = tl.load(w + i[:, None].to(tl.int64) * wide + n[None], real[:, None] & (n < wide)[None], 0.0)
            total = tl.dot(u_mi, w_in, total, input_precision=PRECISION)
    return total


#: Arguments that change with the batch. By default Triton compiles a kernel again if one is 1 or a multiple of 16.
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
    """u[s, m, part * rank + i] = sum of x[m, k] W[i, k] over the columns k from s * SPLIT to (s + 1) * SPLIT, for i <
    STACK * rank; times the group's scale if SCALED. The caller adds up the splits s.

    x [rows, wide] of any float dtype; u float32, its splits `stride_split` apart. Grid: blocks of rows, blocks of
    ranks, splits."""
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
    """y[m, n] += sum over i < STACK * rank of u[m, part * rank + i] W[i, n], times the group's scale if SCALED.

    y [rows, wide] of any float dtype: read, added to in float32, and rounded once to its dtype. Grid: blocks of rows,
    blocks of columns."""
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

    `addresses` are those of gradients, float32 like the factors. y [rows, wide] of any float dtype. An owner is one
    gradient arena: the groups owner_groups[owner_start[o]:owner_start[o + 1]] add to it in that order, so the bits are
    those of one launch for each group. Grid: experts times owners, blocks of columns, blocks of ranks."""
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
    """y[m, n] = sum over k of x[m, k] weight[e, n, k], for the expert e of row m; sums in float32, products of all bits
    ("ieee").

    x [rows, inner] and y [rows, wide] have the dtype of `weight` [experts, wide, inner], which may have any strides.
    `ends` int32: where each expert's rows end. `block_expert` and `first_block` are made by `expert_blocks`. Launched
    by experts.py."""
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
    """Cut rows that end at ends[e] into blocks of at most BLOCK_M rows, none across two experts. Writes the expert of
    each of the `most` blocks (num_experts for a block without rows), and each expert's first block; int32. BLOCK_E is
    at least num_experts."""
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
    """Write the fields of `Routing` (workers/model/routing.py) for few pairs: a pair's place in the sorted order is the
    number of pairs before it. Each program places BLOCK pairs, compared with all BLOCK_P, which is at least `pairs`.
    Equal experts stay in order, so the sort is stable."""
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
    # The same numbers, taken as experts: each is told where its pairs end.
    tl.store(ends + pair, tl.sum((other[None] <= pair[:, None]).to(tl.int32), 1), pair < num_experts)
