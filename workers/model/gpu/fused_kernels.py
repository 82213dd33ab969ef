"""Triton kernels of what is computed between two products, each in one pass over memory: read in the dtype of the
product before, computed in float32, rounded once to the dtype of the product after.

    swiglu, swiglu_backward                  inside of experts (gate.py)
    gather, gather_sum, gather_sum_expand    tokens to experts and back (combine.py)
    add_norm, add_norm_backward              the norm of the hidden state (norms.py)
    turn, turn_backward                      queries and keys (heads.py)

These files launch them and state the shapes; arguments that adapters need are explained in kernels.py. Kernels of
logits are in softmax_kernels.py.

Invariant (isolation): a row's results depend on its own numbers alone. Checked in Triton's interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from workers.model.gpu.kernels import VARYING, _block, _factor, _held, _low_rank


@triton.jit
def rows_of(
    segment, first_block, segment_start, index, rows,
    ADAPTED: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The row numbers of block `index`, int64 [BLOCK_M], and a mask of those that exist: in the block's segment if
    ADAPTED, else among all `rows`."""
    if ADAPTED:
        row, own = _block(segment, first_block, segment_start, index, BLOCK_M)
    else:
        row = index.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        own = row < rows
    return row, own


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
    HELD: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """h = silu(gate + u B_gate) * (up + u B_up) for the columns from s * SPLIT to (s + 1) * SPLIT; if not ADAPTED,
    without u and for all rows (arXiv 2002.05202).

    gate_up [P, 2 wide] with gate before up, h [P, wide]; u float32, whose first `rank` columns are gate's and whose
    next are up's. HELD: one block holds all ranks, so u is read once. Grid: blocks of rows, splits s."""
    index = tl.program_id(0)
    segment = num_segments * 0
    if ADAPTED:
        segment = tl.load(block_segment + index)
    if segment < num_segments:
        row, own = rows_of(segment, first_block, segment_start, index, rows, ADAPTED, BLOCK_M)
        if ADAPTED:
            group, expert = segment % num_groups, segment // num_groups
            rank = tl.load(ranks + group)
            of_gate, of_up = _factor(gate_b, group, expert, rank, wide), _factor(up_b, group, expert, rank, wide)
            u_gate = _held(u + row * stride_u, rank, 1.0, own, BLOCK_R, HELD)
            u_up = _held(u + row * stride_u + rank, rank, 1.0, own, BLOCK_R, HELD)
        for start in range(0, SPLIT, BLOCK_N):
            n = tl.program_id(1) * SPLIT + start + tl.arange(0, BLOCK_N)
            mask = own[:, None] & (n < wide)[None]
            at = gate_up + row[:, None] * (2 * wide) + n[None]
            g = tl.load(at, mask, 0.0).to(tl.float32)
            up = tl.load(at + wide, mask, 0.0).to(tl.float32)
            if ADAPTED:
                g = _low_rank(g, u_gate, of_gate, rank, 1.0, wide, own, n, PRECISION, BLOCK_R, HELD)
                up = _low_rank(up, u_up, of_up, rank, 1.0, wide, own, n, PRECISION, BLOCK_R, HELD)
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
    HELD: tl.constexpr,
    KEPT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The backward of `swiglu` and of the router's weight that multiplies h. With d = dh + dv A_down, the gradient of
    weight * h:

        dweights = sum of d * h over the row
        dgate_up = the gradient of gate and up, from weight * d, the gradient of h
        h        = silu(gate) * up again, if KEPT, for the gradient of A_down

    dh [P, wide], dgate_up [P, 2 wide], weights and dweights float32 [P]. A program holds whole rows, so dweights is one
    sum. HELD: one block holds all ranks."""
    index = tl.program_id(0)
    segment = num_segments * 0
    if ADAPTED:
        segment = tl.load(block_segment + index)
    if segment < num_segments:
        row, own = rows_of(segment, first_block, segment_start, index, rows, ADAPTED, BLOCK_M)
        if ADAPTED:
            group, expert = segment % num_groups, segment // num_groups
            rank = tl.load(ranks + group)
            of_gate, of_up = _factor(gate_b, group, expert, rank, wide), _factor(up_b, group, expert, rank, wide)
            of_down = _factor(down_a, group, expert, rank, wide)
            u_gate = _held(u + row * stride_u, rank, 1.0, own, BLOCK_R, HELD)
            u_up = _held(u + row * stride_u + rank, rank, 1.0, own, BLOCK_R, HELD)
            dv_m = _held(dv + row * stride_dv, rank, 1.0, own, BLOCK_R, HELD)
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
                g = _low_rank(g, u_gate, of_gate, rank, 1.0, wide, own, n, PRECISION, BLOCK_R, HELD)
                up = _low_rank(up, u_up, of_up, rank, 1.0, wide, own, n, PRECISION, BLOCK_R, HELD)
                d = _low_rank(d, dv_m, of_down, rank, 1.0, wide, own, n, PRECISION, BLOCK_R, HELD)
            sigmoid = tl.sigmoid(g)
            silu = g * sigmoid
            active = silu * up
            total += tl.sum(d * active, 1)
            d *= weight
            if KEPT:
                tl.store(h + row[:, None] * wide + n[None], active.to(h.dtype.element_ty), mask)
            dgate = d * up * sigmoid * (1 + g * (1 - sigmoid))
            tl.store(dgate_up + at, dgate.to(dgate_up.dtype.element_ty), mask)
            tl.store(dgate_up + at + wide, (d * silu).to(dgate_up.dtype.element_ty), mask)
        tl.store(dweights + row, total, own)


@triton.jit
def gather(
    x,
    stride_x,
    token,
    out,
    pairs,
    wide,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out[p] = x[token[p]]: a copy, out [pairs, wide] in the dtype of x."""
    p = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, mask = tl.load(token + p, p < pairs, 0), (p < pairs)[:, None] & (n < wide)[None]
    tl.store(out + p[:, None] * wide + n[None], tl.load(x + row[:, None] * stride_x + n[None], mask), mask)


@triton.jit
def gather_sum(
    y,
    stride_y,
    inverse,
    weights,
    out,
    wide,
    CHOICES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out[t] = sum over k of weights[t, k] y[inverse[t, k]], in float32, from the first choice k to the last; without
    weights if not WEIGHTED."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.full((BLOCK_N,), 0.0, tl.float32)
    for k in tl.static_range(CHOICES):
        pair = tl.load(inverse + token * CHOICES + k)
        found = tl.load(y + pair * stride_y + n, n < wide, 0.0).to(tl.float32)
        if WEIGHTED:
            found *= tl.load(weights + token * CHOICES + k)
        total += found
    tl.store(out + token * wide + n, total.to(out.dtype.element_ty), n < wide)


@triton.jit(do_not_specialize=VARYING)
def gather_sum_expand(
    y,
    stride_y,
    inverse,
    weights,
    out,
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
    STACK: tl.constexpr,
    CHOICES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """`gather_sum` for the tokens of one group, plus what the group's adapter adds: sum over i < STACK * rank of u[t,
    i] W[i] (`expand` in kernels.py). Rows are tokens, so a segment is a group."""
    index = tl.program_id(0)
    segment = tl.load(block_segment + index)
    if segment < num_segments:
        row, own = _block(segment, first_block, segment_start, index, BLOCK_M)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = own[:, None] & (n < wide)[None]
        total = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
        for k in tl.static_range(CHOICES):
            pair = tl.load(inverse + row * CHOICES + k, own, 0)
            found = tl.load(y + pair[:, None] * stride_y + n[None], mask, 0.0).to(tl.float32)
            if WEIGHTED:
                found *= tl.load(weights + row * CHOICES + k, own, 0.0)[:, None]
            total += found
        rank = tl.load(ranks + segment)
        w = _factor(addresses, segment, segment * 0, STACK * rank, wide)
        total = _low_rank(total, u + row * stride_u, w, STACK * rank, 1.0, wide, own, n, PRECISION, BLOCK_R)
        tl.store(out + row[:, None] * wide + n[None], total.to(out.dtype.element_ty), mask)


@triton.jit
def add_norm(
    x, delta, norm, total, out, wide, eps,
    ADDED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """total = x + delta if ADDED, else x (then not written); out = total / sqrt(mean(total^2) + eps) * norm. One
    program per row; x, delta and total float32, out of any float dtype."""
    n = tl.arange(0, BLOCK_D)
    at, mask = tl.program_id(0).to(tl.int64) * wide + n, n < wide
    y = tl.load(x + at, mask, 0.0)
    if ADDED:
        y += tl.load(delta + at, mask, 0.0)
        tl.store(total + at, y, mask)
    root = 1 / tl.sqrt(tl.sum(y * y, 0) / wide + eps)
    tl.store(out + at, (y * root * tl.load(norm + n, mask, 0.0)).to(out.dtype.element_ty), mask)


@triton.jit
def add_norm_backward(total, norm, dtotal, dout, dx, wide, eps, BLOCK_D: tl.constexpr):
    """dx of `add_norm`, which is the gradient of delta as well: dtotal plus the norm's gradient. The norm's weight is
    frozen."""
    n = tl.arange(0, BLOCK_D)
    at, mask = tl.program_id(0).to(tl.int64) * wide + n, n < wide
    y, dy = tl.load(total + at, mask, 0.0), tl.load(dout + at, mask, 0.0).to(tl.float32)
    dy *= tl.load(norm + n, mask, 0.0)
    root = 1 / tl.sqrt(tl.sum(y * y, 0) / wide + eps)
    found = root * (dy - y * root * root * (tl.sum(dy * y, 0) / wide))
    tl.store(dx + at, tl.load(dtotal + at, mask, 0.0) + found, mask)


@triton.jit
def _tile(heads, dim, turned, HEADS: tl.constexpr, BLOCK_D: tl.constexpr):
    """The heads of this block, its numbers j of a head, and the mask of those that exist. Rotation pairs j with another
    number of the head, half of `turned` away: `other`, which is j itself beyond `turned`; `sign` is that of the other's
    part in the rotated j."""
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    j = tl.arange(0, BLOCK_D)
    half = turned // 2
    other = tl.where(j < half, j + half, tl.where(j < turned, j - half, j))
    sign = tl.where(j < half, -1.0, 1.0)
    return head, j, other, sign, (head < heads)[:, None] & (j < dim)[None]


@triton.jit
def _root(x, dim, eps):
    """1 / sqrt(mean(x^2) + eps) of each head."""
    return 1 / tl.sqrt(tl.sum(x * x, 1) / dim + eps)


@triton.jit
def turn(
    x, stride_x, norm, cos, sin, out, heads, dim, turned, eps,
    NORMED: tl.constexpr, HEADS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out = y cos + sign * (the other number of y) sin, where y is the head over its root mean square, times `norm`; y
    is x if not NORMED. x float32, [T, heads * dim] with rows stride_x apart; cos and sin float32 [T, turned]; out [T,
    heads, dim]. Grid: tokens, blocks of HEADS heads."""
    token = tl.program_id(0).to(tl.int64)
    head, j, other, sign, mask = _tile(heads, dim, turned, HEADS, BLOCK_D)
    at = x + token * stride_x + head[:, None] * dim
    own = tl.load(at + j[None], mask, 0.0)
    crossed = tl.load(at + other[None], mask, 0.0)
    if NORMED:
        root = _root(own, dim, eps)[:, None]
        own *= root * tl.load(norm + j, j < dim, 0.0)[None]
        crossed *= root * tl.load(norm + other, j < dim, 0.0)[None]
    c = tl.load(cos + token * turned + j, j < turned, 1.0)[None]
    s = tl.load(sin + token * turned + j, j < turned, 0.0)[None]
    y = own * c + crossed * sign[None] * s
    tl.store(out + (token * heads + head[:, None]) * dim + j[None], y.to(out.dtype.element_ty), mask)


@triton.jit
def turn_backward(
    x, stride_x, norm, cos, sin, dout, dx, stride_dx, heads, dim, turned, eps,
    NORMED: tl.constexpr, HEADS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The gradient of x in `turn`, in the dtype of `dx`. The norm's weight is frozen."""
    token = tl.program_id(0).to(tl.int64)
    head, j, other, sign, mask = _tile(heads, dim, turned, HEADS, BLOCK_D)
    at = dout + (token * heads + head[:, None]) * dim
    c = tl.load(cos + token * turned + j, j < turned, 1.0)[None]
    s = tl.load(sin + token * turned + other, j < turned, 0.0)[None]
    # This number's part in the rotated other one: with the opposite sign.
    dy = tl.load(at + j[None], mask, 0.0).to(tl.float32) * c
    dy -= tl.load(at + other[None], mask, 0.0).to(tl.float32) * sign[None] * s
    if NORMED:
        own = tl.load(x + token * stride_x + head[:, None] * dim + j[None], mask, 0.0)
        root = _root(own, dim, eps)[:, None]
        dy *= tl.load(norm + j, j < dim, 0.0)[None]
        dy = root * (dy - own * root * root * (tl.sum(dy * own, 1) / dim)[:, None])
    tl.store(dx + token * stride_dx + head[:, None] * dim + j[None], dy.to(dx.dtype.element_ty), mask)
