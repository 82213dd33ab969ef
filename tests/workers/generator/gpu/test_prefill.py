"""Attention of prompts over pages, in one launch for all: against the formula, and against whoever shares the pass. On
a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.workers.generator.gpu.caches import LOOSER, TOLERANCES, filled_cache
from tests.workers.model.gpu_kit import DEVICE
from workers.generator.attention.prefill_attend import Piece
from workers.generator.cache.kv_cache import PAGE_TOKENS, KVCache, pages_of
from workers.generator.cache.page_groups import Held
from workers.generator.gpu.prefill import PagedPrefill
from workers.model.attend import ALL, Reach

P = PAGE_TOKENS
#: (start, stop) of prompts: computed from the beginning, after cached blocks, and one that goes on with a single token.
SPANS = [(0, 1), (0, 70), (64, 150), (96, 97), (0, 32), (160, 200)]


def scattered(number: int, stop: int) -> list[int]:
    return [(number * 7 + i) * 17 % 64 for i in range(pages_of(stop))]


def qkv(
    tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype = torch.float32, seed: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as the decoder gives them: the values are columns of a wider product."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(tokens, n, dim, generator=generator).to(DEVICE, dtype) for n in (heads, kv_heads))
    wide = torch.randn(tokens, 3 * kv_heads * dim, generator=generator).to(DEVICE, dtype)
    return q, k, wide[:, -kv_heads * dim :].view(tokens, kv_heads, dim)


def pieces_of(spans: list[tuple[int, int]], gone: int = 0) -> list[Piece]:
    return [
        Piece([Held(gone, scattered(number, stop)[gone:])], start, stop) for number, (start, stop) in enumerate(spans)
    ]


def attended(cache: KVCache, pieces: list[Piece], q: Tensor, k: Tensor, v: Tensor, reach: Reach = ALL) -> Tensor:
    return PagedPrefill(cache, pieces, q.shape[1]).attend(1, q, k, v, reach)


def formula(q_NHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, reach: Reach = ALL) -> Tensor:
    """The last N of L positions, in float64, every score written out."""
    rows, length, each = len(q_NHD), len(k_LKD), q_NHD.shape[1] // k_LKD.shape[1]
    q, k, v = (tensor.cpu().double() for tensor in (q_NHD, k_LKD, v_LKD))
    k, v = (tensor.repeat_interleave(each, dim=1) for tensor in (k, v))
    scores_HNL = torch.einsum("nhd,lhd->hnl", q, k) / math.sqrt(q.shape[2])
    own, at = torch.arange(length - rows, length)[:, None], torch.arange(length)[None]
    unseen = (at > own) | ((at <= own - reach.window) if reach.window else torch.zeros(1, 1, dtype=torch.bool))
    scores_HNL.masked_fill_(unseen, -math.inf)
    if reach.sinks_H is not None:
        sinks = reach.sinks_H.cpu().double()[:, None, None].expand(-1, rows, 1)
        scores_HNL = torch.cat((scores_HNL, sinks), -1)
    return torch.einsum("hnl,lhd->nhd", torch.softmax(scores_HNL, -1)[..., :length], v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(6, 2, 16), (2, 2, 24), (8, 1, 64), (10, 2, 16)], ids=lambda number: str(number)
)
def test_prompts_of_many_lengths_in_one_launch(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    cache, pieces = filled_cache(kv_heads, dim, dtype), pieces_of(SPANS)
    before = [tensor.clone() for tensor in cache.tensors]
    q, k, v = qkv(sum(stop - start for start, stop in SPANS), heads, kv_heads, dim, dtype)
    out = attended(cache, pieces, q, k, v)
    assert (out.shape, out.dtype) == (q.shape, dtype)
    at = 0
    for piece in pieces:
        own = slice(at, at + piece.stop - piece.start)
        k_KDL, v_KLD = cache.read(1, piece.pages[0].pages, piece.stop)
        k_LKD, v_LKD = k_KDL[:, :, : piece.stop].permute(2, 0, 1), v_KLD[:, : piece.stop].transpose(0, 1)
        assert torch.equal(k_LKD[piece.start :], k[own])
        assert torch.equal(v_LKD[piece.start :], v[own])
        wanted = formula(q[own], k_LKD, v_LKD)
        error = (out[own].cpu().double() - wanted).abs().max() / wanted.abs().max()
        assert error < TOLERANCES[dtype], f"{piece.start}:{piece.stop} differs by {float(error):.1e}"
        at = own.stop
    changed = [int((now != then).sum()) for now, then in zip(cache.tensors, before, strict=True)]
    assert changed[0] == changed[2] == changed[4] == 0, "another layer's pages, or the routes, were written to"
    assert max(changed) <= len(q) * kv_heads * dim, "more than the new positions was written"


@pytest.mark.parametrize("window", [0, 1, 20, 32, 64, 150])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_prompts_reach_a_window_and_sinks(window: int, sinks: bool) -> None:
    """Pages before the windows are gone, and the page table's entries in their place point to NaN."""
    spans = [(128, 200), (160, 161), (128, 160)]
    gone = max(0, 128 + 1 - window) // P if window else 0
    cache, pieces = filled_cache(2, 16, torch.float32), pieces_of(spans, gone)
    mine = {page for piece in pieces for page in piece.pages[0].pages}
    for page in set(range(64)) - mine:
        cache.k_NKDP[1][page], cache.v_NKPD[1][page] = math.nan, math.nan
    reach = Reach(window, torch.linspace(-3, 9, 6, device=DEVICE) if sinks else None)
    q, k, v = qkv(sum(stop - start for start, stop in spans), 6, 2, 16)
    out = attended(cache, pieces, q, k, v, reach)
    at = 0
    for piece in pieces:
        own, held = slice(at, at + piece.stop - piece.start), piece.pages[0]
        k_KDL, v_KLD = cache.read(1, held.pages, piece.stop - held.start)
        k_LKD = k_KDL[:, :, : piece.stop - held.start].permute(2, 0, 1)
        v_LKD = v_KLD[:, : piece.stop - held.start].transpose(0, 1)
        wanted = formula(q[own], k_LKD, v_LKD, reach)
        torch.testing.assert_close(out[own].cpu().double(), wanted, atol=2e-6 * LOOSER, rtol=1e-5 * LOOSER)
        at = own.stop


@pytest.mark.parametrize("reach", [ALL, Reach(20), Reach(64, torch.linspace(-3, 9, 6, device=DEVICE))], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_prompt_has_the_same_bits_whole_in_pieces_and_in_any_company(reach: Reach, dtype: torch.dtype) -> None:
    stop = 190
    q, k, v = qkv(stop, 6, 2, 16, dtype)
    pages = [Held(0, scattered(0, stop))]
    whole = attended(filled_cache(2, 16, dtype), [Piece(pages, 0, stop)], q, k, v, reach)
    for cut in (96, 160):
        cache = filled_cache(2, 16, dtype)
        for start, end in ((0, cut), (cut, stop)):
            rows = slice(start, end)
            own = attended(cache, [Piece(pages, start, end)], q[rows], k[rows], v[rows], reach)
            assert torch.equal(own, whole[rows])
    others = [Piece([Held(0, scattered(n, b))], a, b) for n, (a, b) in enumerate(SPANS[1:3], 5)]
    more = qkv(sum(piece.stop - piece.start for piece in others), 6, 2, 16, dtype, seed=2)
    both = zip((q, k, v), more, strict=True)
    q_all, k_all, v_all = (torch.cat((new[:70], own, new[70:])) for own, new in both)
    between = [others[0], Piece(pages, 0, stop), others[1]]
    out = attended(filled_cache(2, 16, dtype), between, q_all, k_all, v_all, reach)
    assert torch.equal(out[70 : 70 + stop], whole)


def test_what_lies_beyond_a_prompt_does_not_matter() -> None:
    """Not even if it is NaN."""
    q, k, v = qkv(40, 6, 2, 16)
    wanted = attended(filled_cache(2, 16, torch.float32), pieces_of([(0, 40)]), q, k, v)
    cache, pieces = filled_cache(2, 16, torch.float32), pieces_of([(0, 40)])
    for pool in (cache.k_NKDP[1], cache.v_NKPD[1]):
        pool[:] = math.nan
    assert torch.equal(attended(cache, pieces, q, k, v), wanted)


def test_what_is_not_finite_shows_and_stays_with_its_prompt() -> None:
    q, k, v = qkv(80, 6, 2, 16)
    k[3, 0, 3] = math.nan
    out = attended(filled_cache(2, 16, torch.float32), pieces_of([(0, 40), (0, 40)]), q, k, v)
    assert not out[39].isfinite().all()
    assert out[40:].isfinite().all()


def test_scores_far_apart_are_exact() -> None:
    q, k, v = qkv(90, 6, 2, 16)
    q *= 100
    out = attended(filled_cache(2, 16, torch.float32), pieces_of([(0, 90)]), q, k, v)
    torch.testing.assert_close(out.cpu().double(), formula(q, k, v), atol=1e-4 * LOOSER, rtol=1e-4 * LOOSER)
