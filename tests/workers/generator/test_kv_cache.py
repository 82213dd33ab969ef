"""Attention over paged keys and values gives the plain formula's values; other rows and places change no bit."""

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from workers.generator.attention import decode_attend
from workers.generator.attention.decode_attend import DecodeAttend
from workers.generator.attention.prefill_attend import Piece, PrefillAttend
from workers.generator.attention.recur import PrefillRecur
from workers.generator.cache.kv_cache import PAGE_TOKENS, KVCache, PagePool, pages_of
from workers.generator.cache.page_groups import Held
from workers.model.attend import ALL, Reach

KV_HEADS, HEADS, HEAD_DIM, CONTEXT = 2, 6, 16, 200
PAGES = 64


@pytest.fixture(params=["native", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of the two ways to attend."""
    if request.param == "torch":
        monkeypatch.setattr(decode_attend, "library", lambda source: None)
    return str(request.param)


def filled_cache(seed: int = 0, dtype: torch.dtype = torch.float32) -> KVCache:
    cache = KVCache(layers=1, pages=PAGES, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    for tensor in cache.tensors:
        tensor.normal_(generator=generator)
    return cache


def table(sequences: list[int]) -> npt.NDArray[np.int32]:
    """Scattered pages for sequences, each known by a number."""
    each = pages_of(CONTEXT)
    return np.array([[(n * each + i) * 17 % PAGES for i in range(each)] for n in sequences], dtype=np.int32)


def new_token(rows: int, seed: int = 1, heads: int = HEADS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(rows, n, HEAD_DIM, generator=generator) for n in (heads, KV_HEADS, KV_HEADS))
    return q, k, v


def formula(q_HD: Tensor, k_KDL: Tensor, v_KLD: Tensor, reach: Reach = ALL) -> Tensor:
    out, heads = [], len(q_HD)
    last = slice(-reach.window if reach.window else None, None)
    for head in range(heads):
        kv = head // (heads // KV_HEADS)
        scores = q_HD[head] @ k_KDL[kv, :, last] / math.sqrt(HEAD_DIM)
        if reach.sinks_H is not None:
            scores = torch.cat((scores, reach.sinks_H[head : head + 1]))
        out.append(torch.softmax(scores, 0)[: len(v_KLD[kv, last])] @ v_KLD[kv, last])
    return torch.stack(out)


def check_rows(positions: list[int], heads: int = HEADS, reach: Reach = ALL) -> None:
    cache, pages = filled_cache(), table(list(range(len(positions))))
    q, k, v = new_token(len(positions), heads=heads)
    out = DecodeAttend(cache, pages[None], positions).attend(0, q, k, v, reach)
    for row, position in enumerate(positions):
        keys, values = (part[..., : position + 1, :] for part in _read(cache, pages[row], position + 1))
        assert torch.equal(keys[:, position], k[row])
        assert torch.equal(values[:, position], v[row])
        torch.testing.assert_close(out[row], formula(q[row], keys.transpose(1, 2), values, reach), atol=1e-6, rtol=1e-5)


def _read(cache: KVCache, pages: npt.NDArray[np.int32], length: int) -> tuple[Tensor, Tensor]:
    k_KDL, v_KLD = cache.read(0, pages.tolist(), length)
    return k_KDL.transpose(1, 2), v_KLD


@pytest.mark.parametrize("heads", [2, 4, 6, 8, 10])
def test_rows_of_many_lengths(path: str, heads: int) -> None:
    check_rows([63, 64, 127, 128, 199, 0, 31, 32][: PAGES // pages_of(CONTEXT)], heads)


@pytest.mark.parametrize("window", [0, 1, 33, 64, 180])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_rows_reach_a_window_and_sinks(path: str, window: int, sinks: bool) -> None:
    reach = Reach(window, torch.linspace(-3, 9, HEADS) if sinks else None)
    check_rows([63, 64, 127, 199, 0, 31], HEADS, reach)


@pytest.mark.parametrize("start", [0, 64, 96])
@pytest.mark.parametrize("reach", [ALL, Reach(20), Reach(64, torch.linspace(-3, 9, HEADS))], ids=["all", "20", "sinks"])
def test_blocks_of_a_prompt_reach_as_far_as_rows(start: int, reach: Reach) -> None:
    """And a block has the same bits whether earlier ones are computed with it or are in the cache."""
    stop, pages = 150, table([0])[0].tolist()
    q, k, v = new_token(stop)
    whole, cache = filled_cache(), filled_cache()
    together = PrefillAttend(whole, [Piece([Held(0, pages)], 0, stop)]).attend(0, q, k, v, reach)
    rest = slice(start, stop)
    cache.write(0, pages, 0, k[:start], v[:start])
    own = PrefillAttend(cache, [Piece([Held(0, pages)], start, stop)]).attend(0, q[rest], k[rest], v[rest], reach)
    assert torch.equal(own, together[rest])
    for row in (0, 1, 70, 149):
        wanted = formula(q[row], k[: row + 1].permute(1, 2, 0), v[: row + 1].transpose(0, 1), reach)
        torch.testing.assert_close(together[row], wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("reach", [ALL, Reach(20), Reach(64, torch.linspace(-3, 9, HEADS))], ids=["all", "20", "sinks"])
def test_tokens_of_prompts_have_the_same_bits_whole_in_pieces_and_in_any_company(reach: Reach, threads: int) -> None:
    stop, cut, recur = 150, 96, PrefillRecur([], [], [])
    q, k, v = new_token(stop + 40)
    mine, theirs = ([Held(0, table([own])[0].tolist())] for own in (0, 1))

    def attend(cache: KVCache, *pieces: tuple[list[Held], int, int], rows: slice) -> Tensor:
        of = DecodeAttend.of_prompts(cache, [Piece(*piece) for piece in pieces], recur)
        return of.attend(0, q[rows], k[rows], v[rows], reach)

    torch.set_num_threads(threads)
    together = attend(filled_cache(), (mine, 0, stop), (theirs, 0, 40), rows=slice(None))
    cache = filled_cache()
    parts = [attend(cache, (mine, a, b), rows=slice(a, b)) for a, b in ((0, cut), (cut, stop))]
    torch.set_num_threads(1)
    assert torch.equal(torch.cat(parts), together[:stop])
    for row in (0, 1, 70, 149):
        wanted = formula(q[row], k[: row + 1].permute(1, 2, 0), v[: row + 1].transpose(0, 1), reach)
        torch.testing.assert_close(together[row], wanted, atol=1e-6, rtol=1e-5)


def test_one_row(path: str) -> None:
    check_rows([40])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_is_the_same_bit_for_bit_in_any_company(path: str, threads: int) -> None:
    torch.set_num_threads(threads)
    positions = [70, 3, 100, 199, 80, 127, 64, 12]
    q, k, v = new_token(8)
    together = DecodeAttend(filled_cache(), table(list(range(8)))[None], positions).attend(0, q, k, v)
    for row in range(8):
        one = slice(row, row + 1)
        alone = DecodeAttend(filled_cache(), table([row])[None], positions[one]).attend(0, q[one], k[one], v[one])
        assert torch.equal(alone[0], together[row])
    torch.set_num_threads(1)


@pytest.mark.parametrize("threads", [1, 2])
def test_latents_of_a_real_width_are_exact_in_any_company(path: str, threads: int) -> None:
    """64 heads over one latent of 512 numbers and 64 that turn: the first 512 are also the value, and are kept once."""
    wide, heads, generator = 512, 64, torch.Generator().manual_seed(1)
    q, latents = (torch.randn(4, n, wide + 64, generator=generator) for n in (heads, 1))
    positions, pages = [70, 3, 199, 64], table([0, 1, 2, 3])

    def attended(rows: slice) -> tuple[Tensor, KVCache]:
        cache = KVCache(layers=1, pages=PAGES, kv_heads=1, head_dim=wide + 64, values_within=wide)
        cache.k_NKDP[0].normal_(generator=torch.Generator().manual_seed(0))
        own = latents[rows]
        return DecodeAttend(cache, pages[rows][None], positions[rows]).attend(0, q[rows], own, own[..., :wide]), cache

    torch.set_num_threads(threads)
    together, cache = attended(slice(4))
    for row, position in enumerate(positions):
        assert torch.equal(attended(slice(row, row + 1))[0][0], together[row])
        k_KDL, v_KLD = cache.read(0, pages[row].tolist(), position + 1)
        assert torch.equal(k_KDL[0, :, position], latents[row, 0])
        scores_HL = q[row] @ k_KDL[0, :, : position + 1] / math.sqrt(wide + 64)
        wanted = torch.softmax(scores_HL, -1) @ v_KLD[0, : position + 1]
        torch.testing.assert_close(together[row], wanted, atol=1e-5, rtol=1e-5)
    torch.set_num_threads(1)
    assert sum(tensor.numel() for tensor in cache.tensors) == (PAGES + 1) * (wide + 64) * PAGE_TOKENS


def test_what_is_not_finite_shows_and_stays_with_its_row(path: str) -> None:
    q, k, v = new_token(2)
    k[0, 0, 3] = math.nan
    out = DecodeAttend(filled_cache(), table([0, 1])[None], [40, 50]).attend(0, q, k, v)
    assert not out[0].isfinite().all()
    assert out[1].isfinite().all()


def test_weights_far_apart_are_exact(path: str) -> None:
    """Scores of hundreds, where exponentials vanish."""
    cache, (q, k, v) = filled_cache(), new_token(1)
    q *= 100
    out = DecodeAttend(cache, table([0])[None], [150]).attend(0, q, k, v)
    keys, values = _read(cache, table([0])[0], 151)
    expected = formula(q[0].double(), keys[:, :151].double().transpose(1, 2), values[:, :151].double())
    torch.testing.assert_close(out[0], expected.float(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tokens", [5, 32, 70])
def test_prompts_are_stored_in_pieces_and_read(tokens: int) -> None:
    cache = KVCache(layers=2, pages=8, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    pages = [6, 1, 4, 2]
    _, k, v = new_token(PAGE_TOKENS + tokens)
    cache.write(1, pages, 0, k[:PAGE_TOKENS], v[:PAGE_TOKENS])
    cache.write(1, pages, PAGE_TOKENS, k[PAGE_TOKENS:], v[PAGE_TOKENS:])
    k_KDL, v_KLD = cache.read(1, pages, len(k))
    assert torch.equal(k_KDL[:, :, : len(k)].permute(2, 0, 1), k)
    assert torch.equal(v_KLD[:, : len(k)].transpose(0, 1), v)
    assert not cache.k_NKDP[0].any()


def test_pages_go_out_and_come_back_elsewhere() -> None:
    cache = filled_cache()
    before = cache.read(0, [3, 9, 5], 96)
    saved = cache.take_out([3, 9, 5])
    cache.clear([3, 9, 5])
    cache.bring_in([7, 3, 2, 11], saved)
    after = cache.read(0, [7, 3, 2], 96)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_bfloat16_is_as_exact_as_its_inputs() -> None:
    cache, (q, k, v) = filled_cache(dtype=torch.bfloat16), (tensor.bfloat16() for tensor in new_token(3))
    pages = table([0, 1, 2])
    out = DecodeAttend(cache, pages[None], [5, 150, 64]).attend(0, q, k, v)
    for row, length in enumerate([6, 151, 65]):
        keys, values = (part[:, :length].float() for part in _read(cache, pages[row], length))
        expected = formula(q[row].float(), keys.transpose(1, 2), values)
        torch.testing.assert_close(out[row].float(), expected, atol=2e-2, rtol=2e-2)


# -- whose the pages are


def test_a_shared_page_is_free_when_all_have_released_it() -> None:
    pool = PagePool(4)
    mine = pool.take(3)
    pool.share(mine[:1])
    pool.release(mine)
    assert pool.free == 3
    pool.release(mine[:1])
    assert sorted(pool.take(4)) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="0 of 4 are free"):
        pool.take(1)
