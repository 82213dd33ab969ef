"""Every kernel gives a row the same bits alone and in any crowd, at any place in it, whatever the sizes.
test_widths.py runs these tests as on other processors."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from workers.generator.attention.decode_attend import DecodeAttend
from workers.generator.cache.kv_cache import PAGE_TOKENS, KVCache
from workers.model.attend import Reach
from workers.model.config import GateConfig
from workers.model.lora.base_mm import base_mm
from workers.model.mixture.gate import activated, again
from workers.model.native import gate, gemm, joined
from workers.model.native.build import library
from workers.model.parts.one_token import Tokens, one_token

#: Rows of the crowd: more than any kernel takes at a time, and no multiple of that.
ROWS = 203
WIDTHS = (1, 7, 16, 17, 31, 33, 40, 63, 64, 65, 72, 100, 129, 150)
RUNS = [(0, 1), (5, 1), (202, 1), (3, 2), (7, 3), (1, 5), (11, 6), (30, 7), (50, 16), (60, 25), (100, 64), (100, 103)]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same_alone(of: Callable[..., Tensor], *rows: Tensor, runs: Sequence[tuple[int, int]] = RUNS) -> None:
    """Check that `of` gives all rows together the bits that it gives each run of them by itself."""
    crowd = of(*rows)
    assert crowd.isfinite().all()
    for start, count in runs:
        alone = of(*(part[start : start + count].clone() for part in rows))
        assert torch.equal(alone, crowd[start : start + count]), f"rows {start}..{start + count}"


def sizes(seed: int) -> tuple[int, int, int]:
    """Two widths and a number of threads."""
    chosen = random.Random(seed)
    return chosen.choice(WIDTHS), chosen.choice((*WIDTHS, 300)), chosen.choice((1, 1, 2, 3))


SEEDS = pytest.mark.parametrize("seed", range(12))


@SEEDS
@pytest.mark.parametrize("how", ["packed", "as it is", "transposed"])
def test_products_with_the_base(seed: int, how: str) -> None:
    out, inner, count = sizes(seed)
    torch.set_num_threads(count)
    weight = numbers(inner, out) if how == "transposed" else numbers(out, inner)
    assert how != "packed" or gemm.pack(weight)
    same_alone(lambda x: base_mm(x, weight, transposed=how == "transposed"), numbers(ROWS, inner, seed=2))


@SEEDS
@pytest.mark.parametrize("config", [GateConfig(), GateConfig(1.0, 1.702), GateConfig(gated=False)])
@pytest.mark.parametrize("native", [True, False])
def test_what_an_mlp_computes(seed: int, config: GateConfig, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(gate, "library", lambda: None)
    width, _, count = sizes(seed)
    torch.set_num_threads(count)

    def both(x: Tensor, dh: Tensor) -> Tensor:
        of, dx = again(config, x), torch.empty_like(x)
        of.backward(dh, dx)
        assert torch.equal(of.h, activated(config, x)) or not native or config.limit
        return torch.cat((activated(config, x), of.h, dx), dim=1)

    same_alone(both, numbers(ROWS, len(config.parts) * width), numbers(ROWS, width, seed=3))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("config", [GateConfig(), GateConfig(1.0, 1.702)])
def test_a_thread_s_share_may_end_within_a_row(
    config: GateConfig, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With enough rows that a library divides them among five threads."""
    if not native:
        monkeypatch.setattr(gate, "library", lambda: None)
    torch.set_num_threads(5)
    x = numbers(1367, 2 * 96)
    same_alone(lambda x: activated(config, x), x, runs=[(0, 1000), (301, 700), (1366, 1)])
    same_alone(lambda x: again(config, x).h, x, runs=[(0, 1000), (301, 700), (1366, 1)])


@SEEDS
def test_norms_and_choices(seed: int) -> None:
    width, experts, count = sizes(seed)
    torch.set_num_threads(count)
    norm, heads = numbers(width), 1 + seed % 3
    same_alone(lambda x: joined.heads(x, heads, norm, 1e-6), numbers(ROWS, heads * width))
    choices = min(experts, 1 + seed % 5)

    def chosen(logits: Tensor) -> Tensor:
        weights, which = joined.choose(logits, choices, normed=True, scaling=1.5)
        return torch.cat((weights, which.float()), dim=1)

    same_alone(chosen, numbers(ROWS, experts))


@SEEDS
def test_a_step_of_a_recurrence(seed: int) -> None:
    dim, width, count = sizes(seed)
    torch.set_num_threads(count)
    q, k, v = numbers(17, 1, dim), numbers(17, 1, dim, seed=2), numbers(17, 2, width, seed=3)
    decay, rate, states = numbers(17, 2, seed=4).sigmoid(), numbers(17, 2, seed=5).sigmoid(), numbers(17, 2, dim, width)

    def step(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, states: Tensor) -> Tensor:
        tokens = Tokens(q, k, v, decay, rate if seed % 2 else None)
        out, after = one_token(tokens, list(states.unbind()))
        return torch.cat((out.flatten(1), torch.stack(after).flatten(1)), dim=1)

    same_alone(step, q, k, v, decay, rate, states, runs=[(0, 1), (16, 1), (3, 2), (5, 11)])


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 16), (4, 2, 32), (6, 2, 48), (7, 1, 80), (5, 1, 16)])
@pytest.mark.parametrize("window", [0, 40])
def test_attention_of_a_step(heads: int, kv_heads: int, dim: int, window: int) -> None:
    """With rows of other lengths beside it, and each sequence's pages anywhere in the cache."""
    lengths = [1, 31, 32, 33, 70, 100, 129]
    pages = 1 + max(lengths) // PAGE_TOKENS
    table = np.arange(len(lengths) * pages, dtype=np.int32).reshape(len(lengths), pages)
    cache = KVCache(layers=1, pages=table.size, kv_heads=kv_heads, head_dim=dim)
    for pool in (cache.k_NKDP[0], cache.v_NKPD[0]):
        pool.copy_(numbers(*pool.shape))
    sinks = numbers(heads) if window else None

    def attended(rows: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        which = rows.tolist()
        step = DecodeAttend(cache, table[None, which].copy(), [lengths[i] - 1 for i in which])
        return step.attend(0, q, k, v, Reach(window, sinks))

    tokens = (numbers(len(lengths), n, dim, seed=n) for n in (heads, kv_heads, kv_heads))
    runs = [(i, 1) for i in range(len(lengths))]
    same_alone(attended, torch.arange(len(lengths)), *tokens, runs=[*runs, (2, 3)])


def test_the_kernels_are_there() -> None:
    assert library() is not None, "install a C compiler"
