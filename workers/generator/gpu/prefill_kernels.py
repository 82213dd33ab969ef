"""Triton kernels of a prefill: the prompts of a pass, of any lengths, and the pages of their sequences.

    store_blocks  write new keys and values to their place in the pages
    attend_tiles  causal attention of consecutive tokens of a prompt over all positions up to them
    copy_pages    copy pages of all layers, between cache and prefix cache or from sequence to sequence

Invariant: a token gets the same bits whether its prompt is computed whole, in pieces, or behind cached blocks, and
whatever else is in the pass. For keys and values are always read from the pages, in the order of positions, whether
this pass stored them or they were cached. Tiles lie at multiples of their size in the prompt, so a token's row in its
tile follows from its position, and positions that a row does not reach add exact zeros to its sums.

The tokens of a tile and the queries that share a kv head are the rows of one product. Sums are float32. Launched by
prefill.py and pages.py; checked in Triton's interpreter.

Shapes: T packed tokens, B blocks or tiles, H query heads, K kv heads, G = H / K, D head dim, P positions of a page, M
rows of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_blocks(
    k_new,
    stride_k,
    v_new,
    stride_v,
    k_NKDP,
    v_NKPD,
    blocks_B3,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """For each row (first, count, page) of `blocks_B3`: write the keys and values of the tokens `first` to `first +
    count` to the first positions of `page`. Grid: blocks, kv heads."""
    at, head = blocks_B3 + tl.program_id(0) * 3, tl.program_id(1)
    first, count, page = tl.load(at).to(tl.int64), tl.load(at + 1), tl.load(at + 2).to(tl.int64)
    p, d = tl.arange(0, PAGE), tl.arange(0, BLOCK_D)
    own = (p < count)[:, None] & (d < DIM)[None]
    base = (page * HEADS + head) * DIM * PAGE
    k_PD = tl.load(k_new + (first + p)[:, None] * stride_k + head * DIM + d[None], own)
    v_PD = tl.load(v_new + (first + p)[:, None] * stride_v + head * DIM + d[None], own)
    tl.store(k_NKDP + base + d[None] * PAGE + p[:, None], k_PD, own)
    tl.store(v_NKPD + base + p[:, None] * DIM + d[None], v_PD, own)


@triton.jit
def attend_tiles(
    q_THD,
    stride_q,
    k_NKDP,
    v_NKPD,
    tiles_B5,
    pages,
    sinks_H,
    scale_log2,
    out_THD,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """softmax(q k^T / sqrt(D)) v over pages, in one pass with running maxima (FlashAttention, arXiv 2205.14135), with
    an optional window and sinks.

    For each row (first, low, high, position, table) of `tiles_B5`: packed token `first + i` is the token at `position +
    i` of a sequence whose page n is pages[table + n], for low <= i < high. `first` is negative if the prompt's piece
    begins inside of its first tile, near the start of the pass. Grid: tiles, kv heads."""
    at, head = tiles_B5 + tl.program_id(0) * 5, tl.program_id(1)
    first, low, high = tl.load(at).to(tl.int64), tl.load(at + 1), tl.load(at + 2)
    position, table = tl.load(at + 3), tl.load(at + 4)
    m, d, p = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, PAGE)
    token, query = m // GROUPS, head * GROUPS + m % GROUPS
    own, real = (token >= low) & (token < high), d < DIM
    q_MD = tl.load(
        q_THD + (first + token)[:, None] * stride_q + query[:, None] * DIM + d[None], own[:, None] & real[None], 0.0
    )
    top_M = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    mass_M = tl.full((BLOCK_M,), 0.0, tl.float32)
    sum_MD = tl.full((BLOCK_M, BLOCK_D), 0.0, tl.float32)
    lowest = position * 0
    if WINDOW:
        lowest = tl.maximum(position + low + 1 - WINDOW, 0) // PAGE
    for n in range(lowest, (position + high - 1) // PAGE + 1):
        base = (tl.load(pages + table + n).to(tl.int64) * HEADS + head) * DIM * PAGE
        where_P = n * PAGE + p
        # A mask along neighbours would keep keys from being read as vectors; their scores are masked below.
        k_DP = tl.load(k_NKDP + base + d[:, None] * PAGE + p[None], real[:, None], 0.0)
        written = (where_P < position + high)[:, None] & real[None]
        v_PD = tl.load(v_NKPD + base + p[:, None] * DIM + d[None], written, 0.0)
        scores_MP = tl.dot(q_MD, k_DP, input_precision=PRECISION) * scale_log2
        seen_MP = where_P[None] <= (position + token)[:, None]
        if WINDOW:
            seen_MP = seen_MP & (where_P[None] > (position + token)[:, None] - WINDOW)
        scores_MP = tl.where(seen_MP, scores_MP, float("-inf"))
        higher_M = tl.maximum(top_M, tl.max(scores_MP, 1))
        # A row whose window begins on a later page has no finite score yet.
        finite_M = tl.where(higher_M == float("-inf"), 0.0, higher_M)
        weights_MP = tl.exp2(scores_MP - finite_M[:, None])
        shrunk_M = tl.exp2(top_M - finite_M)
        mass_M = mass_M * shrunk_M + tl.sum(weights_MP, 1)
        sum_MD = tl.dot(weights_MP.to(v_PD.dtype), v_PD, sum_MD * shrunk_M[:, None], input_precision=PRECISION)
        top_M = higher_M
    if SINKS:
        sink_M = tl.load(sinks_H + query, own, 0.0).to(tl.float32) * 1.4426950408889634
        higher_M = tl.maximum(top_M, sink_M)
        kept_M = tl.exp2(top_M - higher_M)
        mass_M = mass_M * kept_M + tl.exp2(sink_M - higher_M)
        sum_MD = sum_MD * kept_M[:, None]
    out_MD = sum_MD / tl.where(own, mass_M, 1.0)[:, None]
    to = out_THD + ((first + token) * HEADS * GROUPS + query)[:, None] * DIM + d[None]
    tl.store(to, out_MD.to(out_THD.dtype.element_ty), own[:, None] & real[None])


@triton.jit
def copy_pages(table_3B, tensors, pairs_C2, BLOCK: tl.constexpr):
    """Copy page pairs[c, 0] of each source to page pairs[c, 1] of its target. `table_3B` int64 [3, tensors]: the
    addresses of the sources, those of the targets, and the words of 4 bytes in a page. Grid: tensors, pairs."""
    tensor, pair = tl.program_id(0), tl.program_id(1)
    size = tl.load(table_3B + 2 * tensors + tensor)
    source = tl.load(table_3B + tensor).to(tl.pointer_type(tl.int32))
    target = tl.load(table_3B + tensors + tensor).to(tl.pointer_type(tl.int32))
    source += tl.load(pairs_C2 + pair * 2) * size
    target += tl.load(pairs_C2 + pair * 2 + 1) * size
    for start in range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(target + i, tl.load(source + i, i < size), i < size)
