"""Decode attention over pages in place gives the formula's values, whoever shares the step. On a GPU if there is one,
else in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.workers.generator.gpu.caches import LOOSER, TOLERANCES, filled_cache
from tests.workers.model.gpu_kit import DEVICE
from workers.generator.cache.kv_cache import PAGE_TOKENS, KVCache, pages_of
from workers.generator.gpu.attend import MAX_SPLITS, MIN_PAGES, PagedAttend
from workers.model.attend import ALL, Reach

LONG = (MAX_SPLITS * MIN_PAGES + 5) * PAGE_TOKENS


def table(sequences: list[int], width: int, pages: int = 64) -> Tensor:
    """Scattered pages for sequences, each known by a number."""
    rows = [[(n * width + i) * 17 % pages for i in range(width)] for n in sequences]
    return torch.tensor(rows, dtype=torch.int32, device=DEVICE)


def new_token(
    rows: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as the decoder gives them: the values are columns of a wider product."""
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(rows, n, dim, generator=generator).to(DEVICE, dtype) for n in (heads, kv_heads))
    wide = torch.randn(rows, 3 * kv_heads * dim, generator=generator).to(DEVICE, dtype)
    return q, k, wide[:, -kv_heads * dim :].view(rows, kv_heads, dim)


def attend(cache: KVCache, table_RW: Tensor, positions: list[int], *qkv: Tensor, reach: Reach = ALL) -> Tensor:
    return PagedAttend(cache, table_RW[None], torch.tensor(positions, device=DEVICE)).attend(1, *qkv, reach=reach)


def formula(q_HD: Tensor, k_KDL: Tensor, v_KLD: Tensor, reach: Reach = ALL) -> Tensor:
    each = len(q_HD) // len(k_KDL)
    last = slice(-reach.window if reach.window else None, None)
    q, k, v = (tensor.double() for tensor in (q_HD, k_KDL[:, :, last], v_KLD[:, last]))
    scores_KGL = q.view(len(k), each, -1) @ k / math.sqrt(q.shape[1])
    if reach.sinks_H is not None:
        scores_KGL = torch.cat((scores_KGL, reach.sinks_H.double().view(len(k), each, 1)), -1)
    return (torch.softmax(scores_KGL, -1)[..., : v.shape[1]] @ v).flatten(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(6, 2, 16), (2, 2, 24), (8, 1, 64)], ids=lambda number: str(number)
)
def test_rows_of_many_lengths(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    positions = [63, 64, 127, 128, 199, 0, 31, 32]
    cache, pages = filled_cache(kv_heads, dim, dtype), table(list(range(8)), pages_of(200))
    before = [tensor.clone() for tensor in cache.tensors]
    q, k, v = new_token(8, heads, kv_heads, dim, dtype)
    out = attend(cache, pages, positions, q, k, v)
    assert (out.shape, out.dtype) == (q.shape, dtype)
    for row, position in enumerate(positions):
        k_KDL, v_KLD = cache.read(1, pages[row].tolist(), position + 1)
        k_KDL, v_KLD = k_KDL[:, :, : position + 1], v_KLD[:, : position + 1]
        assert torch.equal(k_KDL[:, :, position], k[row])
        assert torch.equal(v_KLD[:, position], v[row])
        wanted = formula(q[row], k_KDL, v_KLD)
        error = (out[row].double() - wanted).abs().max() / wanted.abs().max()
        assert error < TOLERANCES[dtype], f"row {row} differs by {float(error):.1e}"
    changed = [int((now != then).sum()) for now, then in zip(cache.tensors, before, strict=True)]
    assert changed[0] == changed[2] == changed[4] == 0, "another layer's pages, or the routes, were written to"
    assert max(changed) <= 8 * kv_heads * dim, "more than the new positions was written"


@pytest.mark.parametrize("window", [0, 1, 40, 64, 150])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_rows_reach_a_window_and_sinks(window: int, sinks: bool) -> None:
    """Among them are parts before the window, full of NaN."""
    positions = [63, 64, 199, 0, 700]
    cache, pages = filled_cache(2, 16, torch.float32, 256), table(list(range(5)), 22, 256)
    reach = Reach(window, torch.linspace(-3, 9, 6, device=DEVICE) if sinks else None)
    q, k, v = new_token(5, 6, 2, 16)
    if window:
        for row, position in enumerate(positions):
            for n in range((position + 1 - window) // PAGE_TOKENS):
                cache.k_NKDP[1][int(pages[row, n])] = math.nan
    out = attend(cache, pages, positions, q, k, v, reach=reach)
    for row, position in enumerate(positions):
        k_KDL, v_KLD = cache.read(1, pages[row].tolist(), position + 1)
        wanted = formula(q[row], k_KDL[:, :, : position + 1], v_KLD[:, : position + 1], reach)
        torch.testing.assert_close(out[row].double(), wanted, atol=1e-6 * LOOSER, rtol=1e-5 * LOOSER)


def test_long_rows_are_cut_in_no_more_parts() -> None:
    """Rows longer than MAX_SPLITS parts of MIN_PAGES: the parts grow."""
    width = pages_of(LONG)
    cache, pages = filled_cache(1, 16, torch.float32, pages=2 * width), table([0, 1], width, pages=2 * width)
    q, k, v = new_token(2, 2, 1, 16)
    positions = [LONG - 1, LONG - 7 * PAGE_TOKENS]
    out = attend(cache, pages, positions, q, k, v)
    for row, position in enumerate(positions):
        k_KDL, v_KLD = cache.read(1, pages[row].tolist(), position + 1)
        wanted = formula(q[row], k_KDL[:, :, : position + 1], v_KLD[:, : position + 1])
        torch.testing.assert_close(out[row].double(), wanted, atol=1e-6 * LOOSER, rtol=1e-5 * LOOSER)


def test_a_row_is_the_same_bit_for_bit_in_any_company() -> None:
    positions = [70, 3, 700, 199, 80, 127, 64, 12]
    q, k, v = new_token(8, 6, 2, 16)
    together = attend(filled_cache(2, 16, torch.float32, 256), table(list(range(8)), 22, 256), positions, q, k, v)
    for row in range(8):
        one = slice(row, row + 1)
        cache = filled_cache(2, 16, torch.float32, 256)
        alone = attend(cache, table([row], 22, 256), positions[one], q[one], k[one], v[one])
        assert torch.equal(alone[0], together[row])


def test_what_is_not_finite_shows_and_stays_with_its_row() -> None:
    q, k, v = new_token(2, 6, 2, 16)
    k[0, 0, 3] = math.nan
    out = attend(filled_cache(2, 16, torch.float32), table([0, 1], 7), [40, 50], q, k, v)
    assert not out[0].isfinite().all()
    assert out[1].isfinite().all()


def test_what_lies_beyond_a_sequence_does_not_matter() -> None:
    """Not even if it is NaN."""
    cache, pages = filled_cache(2, 16, torch.float32), table([0], 7)
    qkv = new_token(1, 6, 2, 16)
    wanted = attend(cache, pages, [40], *qkv)
    last = int(pages[0, 1])
    cache.k_NKDP[1][last, :, :, 9:] = math.nan
    cache.v_NKPD[1][last, :, 9:] = math.nan
    assert torch.equal(attend(cache, pages, [40], *qkv), wanted)


def test_scores_far_apart_are_exact() -> None:
    """Scores of hundreds, where exponentials vanish."""
    cache, pages = filled_cache(2, 16, torch.float32), table([0], 7)
    q, k, v = new_token(1, 6, 2, 16)
    q *= 100
    out = attend(cache, pages, [150], q, k, v)
    k_KDL, v_KLD = cache.read(1, pages[0].tolist(), 151)
    wanted = formula(q[0], k_KDL[:, :, :151], v_KLD[:, :151])
    torch.testing.assert_close(out[0].double(), wanted, atol=1e-4 * LOOSER, rtol=1e-4 * LOOSER)
