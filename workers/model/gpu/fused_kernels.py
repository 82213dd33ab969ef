"""Triton kernels of what lies between products: one pass each, in float32 inside, rounded once to what is taken next.

Of the hidden state (norms.py), experts (gate.py, combine.py), and queries and keys (heads.py), which say the shapes.
Those of logits are in softmax_kernels.py. What a row gets depends on its own numbers alone. Checked in Triton's
interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from workers.model.gpu.kernels import VARYING, _beside_held, _block, _factor, _held, _low_rank


@triton.jit
def rows_of(
    segment, first_block, segment_start, index, rows,
    ADAPTED: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Rows of block `index`, and which of them there are: of its segment, or, not ADAPTED, of all."""
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
    """h = silu(gate + u B_gate) * (up + u B_up) over columns s * SPLIT to (s + 1) * SPLIT; not ADAPTED: of all rows,
    without u. HELD: a block holds all ranks."""
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
            u_m = u + row * stride_u
        if HELD:
            held_gate, held_up = _held(u_m, rank, 1.0, own, BLOCK_R), _held(u_m + rank, rank, 1.0, own, BLOCK_R)
        for start in range(0, SPLIT, BLOCK_N):
            n = tl.program_id(1) * SPLIT + start + tl.arange(0, BLOCK_N)
            mask = own[:, None] & (n < wide)[None]
            at = gate_up + row[:, None] * (2 * wide) + n[None]
            g = tl.load(at, mask, 0.0).to(tl.float32)
            up = tl.load(at + wide, mask, 0.0).to(tl.float32)
            if HELD:
                g = _beside_held(g, held_gate, of_gate, rank, wide, n, PRECISION, BLOCK_R)
                up = _beside_held(up, held_up, of_up, rank, wide, n, PRECISION, BLOCK_R)
            elif ADAPTED:
                g = _low_rank(g, u_m, of_gate, rank, 1.0, wide, own, n, PRECISION, BLOCK_R)
                up = _low_rank(up, u_m + rank, of_up, rank, 1.0, wide, own, n, PRECISION, BLOCK_R)
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
    """Of dh + dv A_down, the gradient of h before the router's weight: d(gate, up) behind that weight, the weight's own
    gradient, the sum of dh * h over the row, and, KEPT, h again. HELD: a block holds all ranks."""
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
            u_m = u + row * stride_u
            of_down = _factor(down_a, group, expert, rank, wide)
        if HELD:
            held_gate, held_up = _held(u_m, rank, 1.0, own, BLOCK_R), _held(u_m + rank, rank, 1.0, own, BLOCK_R)
            held_down = _held(dv + row * stride_dv, rank, 1.0, own, BLOCK_R)
        weight = tl.load(weights + row, own, 0.0)[:, None]
        total = tl.full((BLOCK_M,), 0.0, tl.float32)
        for start in range(0, wide, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            mask = own[:, None] & (n < wide)[None]
            at = row[:, None] * (2 * wide) + n[None]
            g = tl.load(gate_up + at, mask, 0.0).to(tl.float32)
            up = tl.load(gate_up + at + wide, mask, 0.0).to(tl.float32)
            d = tl.load(dh + row[:, None] * wide + n[None], mask, 0.0).to(tl.float32)
            if HELD:
                g = _beside_held(g, held_gate, of_gate, rank, wide, n, PRECISION, BLOCK_R)
                up = _beside_held(up, held_up, of_up, rank, wide, n, PRECISION, BLOCK_R)
                d = _beside_held(d, held_down, of_down, rank, wide, n, PRECISION, BLOCK_R)
            elif ADAPTED:
                g = _low_rank(g, u_m, of_gate, rank, 1.0, wide, own, n, PRECISION, BLOCK_R)
                up = _low_rank(up, u_m + rank, of_up, rank, 1.0, wide, own, n, PRECISION, BLOCK_R)
                d = _low_rank(d, dv + row * stride_dv, of_down, rank, 1.0, wide, own, n, PRECISION, BLOCK_R)
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
    """out[p] = x[token[p]]."""
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
    """out[t] = sum over k of weights[t, k] y[inverse[t, k]], first to last, in float32."""
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
    """The same, of the tokens of a group, + sum over i < STACK * rank of u[t, i] W[i] (`expand` in kernels.py)."""
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
    """total = x + delta, ADDED, and out = total over its root mean square, times `norm`."""
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
    """dx of `add_norm`, which is that of delta, too."""
    n = tl.arange(0, BLOCK_D)
    at, mask = tl.program_id(0).to(tl.int64) * wide + n, n < wide
    y, dy = tl.load(total + at, mask, 0.0), tl.load(dout + at, mask, 0.0).to(tl.float32)
    dy *= tl.load(norm + n, mask, 0.0)
    root = 1 / tl.sqrt(tl.sum(y * y, 0) / wide + eps)
    found = root * (dy - y * root * root * (tl.sum(dy * y, 0) / wide))
    tl.store(dx + at, tl.load(dtotal + at, mask, 0.0) + found, mask)


@triton.jit
def _tile(heads, dim, turned, HEADS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Heads and numbers of this block; the other number of the plane in which each turns, itself where none does, and
    the sign with which that one is added."""
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    j = tl.arange(0, BLOCK_D)
    half = turned // 2
    other = tl.where(j < half, j + half, tl.where(j < turned, j - half, j))
    sign = tl.where(j < half, -1.0, 1.0)
    return head, j, other, sign, (head < heads)[:, None] & (j < dim)[None]


@triton.jit
def _root(x, dim, eps):
    return 1 / tl.sqrt(tl.sum(x * x, 1) / dim + eps)


@triton.jit
def turn(
    x, stride_x, norm, cos, sin, out, heads, dim, turned, eps,
    NORMED: tl.constexpr, HEADS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out = y cos + (the other number of the plane, signed) sin, where y is the head over its root mean square, times
    `norm`, or x."""
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
    """dx of `turn`."""
    token = tl.program_id(0).to(tl.int64)
    head, j, other, sign, mask = _tile(heads, dim, turned, HEADS, BLOCK_D)
    at = dout + (token * heads + head[:, None]) * dim
    c = tl.load(cos + token * turned + j, j < turned, 1.0)[None]
    s = tl.load(sin + token * turned + other, j < turned, 0.0)[None]
    # What this number adds to the other's: its sign there is the other one.
    dy = tl.load(at + j[None], mask, 0.0).to(tl.float32) * c
    dy -= tl.load(at + other[None], mask, 0.0).to(tl.float32) * sign[None] * s
    if NORMED:
        own = tl.load(x + token * stride_x + head[:, None] * dim + j[None], mask, 0.0)
        root = _root(own, dim, eps)[:, None]
        dy *= tl.load(norm + j, j < dim, 0.0)[None]
        dy = root * (dy - own * root * root * (tl.sum(dy * own, 1) / dim)[:, None])
    tl.store(dx + token * stride_dx + head[:, None] * dim + j[None], dy.to(dx.dtype.element_ty), mask)
