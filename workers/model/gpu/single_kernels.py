"""Triton kernels of the low-rank products if every row is a group of its own. Launched by single.py; checked in
Triton's interpreter.

`addresses` int64 [N, G]: where each of the N tensors begins, by group; `index` says which of the N. If PAIRED, a row is
a (token, expert) pair: `token` int64 is its row in the batch, and so its group, `expert` its expert. Otherwise the two
are not read, and a row's group is its own number.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _factor(addresses, index, ranks, token, expert, pair, num_groups, wide, PAIRED: tl.constexpr, STACK: tl.constexpr):
    """For a row: its group; the address of the group's factor (0 if the group lacks it); a pointer to the factor's
    first element for the row's expert; and the number of the factor's rows, STACK * rank."""
    group = tl.load(token + pair) if PAIRED else pair
    address = tl.load(addresses + index * num_groups + group)
    count = STACK * tl.load(ranks + group)
    w = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
    if PAIRED:
        w += tl.load(expert + pair) * count * wide
    return group, address, w, count


#: Arguments that change from layer to layer and from batch to batch: by default Triton compiles again for some values.
VARYING = ["index_0", "index_1", "index_2", "index_3", "num_groups", "part"]


@triton.jit(do_not_specialize=VARYING)
def shrink_row(
    x,
    stride_x,
    u,
    stride_u,
    addresses,
    index_0,
    ranks,
    scales,
    token,
    expert,
    num_groups,
    wide,
    part,
    PAIRED: tl.constexpr,
    STACK: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """u[m, part * rank + i] = sum over k of x[m, k] W[i, k] for i < STACK * rank, times the group's scale if SCALED. x
    of any float dtype, u and sums float32. Grid: rows, blocks of ranks."""
    row = tl.program_id(0).to(tl.int64)
    group, address, w, count = _factor(addresses, index_0, ranks, token, expert, row, num_groups, wide, PAIRED, STACK)
    i = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    if (address != 0) & (tl.program_id(1) * BLOCK_R < count):
        total = tl.full((BLOCK_R, BLOCK_K), 0.0, tl.float32)
        for start in range(0, wide, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            x_k = tl.load(x + row * stride_x + k, k < wide, 0.0).to(tl.float32)
            w_ik = tl.load(w + i[:, None] * wide + k[None], (i < count)[:, None] & (k < wide)[None], 0.0)
            total += w_ik * x_k[None]
        u_i = tl.sum(total, 1)
        if SCALED:
            u_i = u_i * tl.load(scales + group)
        tl.store(u + row * stride_u + part * (count // STACK) + i, u_i, i < count)


@triton.jit(do_not_specialize=VARYING)
def expand_row(
    y,
    stride_y,
    u,
    stride_u,
    addresses,
    index_0,
    index_1,
    index_2,
    index_3,
    wide_0,
    wide_1,
    wide_2,
    wide_3,
    ranks,
    scales,
    token,
    expert,
    num_groups,
    part,
    PAIRED: tl.constexpr,
    STACK: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """y[m, n] += sum over i < STACK * rank of u[m, part * rank + i] W[i, n], times the group's scale if SCALED; summed
    in float32, rounded once to the dtype of y.

    Serves up to four parts, which lie side by side in y, each with its own W (index_0 to index_3) and width; `part` is
    the first one's number in u. Grid: rows, blocks of columns, parts."""
    row, beside = tl.program_id(0).to(tl.int64), tl.program_id(2)
    index, wide, first = index_0, wide_0, 0
    if beside > 0:
        index = tl.where(beside == 1, index_1, tl.where(beside == 2, index_2, index_3))
        wide = tl.where(beside == 1, wide_1, tl.where(beside == 2, wide_2, wide_3))
        first = wide_0 + tl.where(beside > 1, wide_1, 0) + tl.where(beside > 2, wide_2, 0)
    begin = tl.program_id(1) * BLOCK_N
    if begin < wide:
        group, address, w, count = _factor(addresses, index, ranks, token, expert, row, num_groups, wide, PAIRED, STACK)
        n = begin + tl.arange(0, BLOCK_N)
        inside = n < wide
        if address != 0:
            at = y + row * stride_y + first + n
            before = tl.load(at, inside, 0.0).to(tl.float32)
            u += row * stride_u + (part + beside) * (count // STACK)
            total = tl.full((BLOCK_N,), 0.0, tl.float32)
            for start in range(0, count, BLOCK_R):
                i = start + tl.arange(0, BLOCK_R)
                u_i = tl.load(u + i, i < count, 0.0)
                w_in = tl.load(w + i[:, None] * wide + n[None], (i < count)[:, None] & inside[None], 0.0)
                total += tl.sum(w_in * u_i[:, None], 0)
            if SCALED:
                total = total * tl.load(scales + group)
            tl.store(at, (before + total).to(y.dtype.element_ty), inside)
