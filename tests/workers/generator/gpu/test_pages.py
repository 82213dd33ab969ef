"""Copying pages in one launch gives the same as copying them tensor by tensor and page by page."""

from __future__ import annotations

import pytest
import torch

from tests.workers.generator.gpu.launches import counted
from tests.workers.model.gpu_kit import DEVICE
from workers.generator.cache import kv_cache
from workers.generator.cache.kv_cache import KVCache
from workers.generator.cache.page_groups import Held
from workers.generator.cache.prefix_cache import PrefixCache
from workers.generator.gpu import pages

PAIRS = [(3, 0), (5, 7), (3, 9)]


def filled(dtype: torch.dtype, *, latent: bool = False, groups: list[list[int]] | None = None) -> KVCache:
    """Pages of all kinds: keys and values larger than a program copies at once, and routes."""
    cache = KVCache(layers=4, pages=12, kv_heads=1 if latent else 2, head_dim=24, values_within=16 if latent else 0,
                    mixture_layers=3, choices=2, groups=groups or (), dtype=dtype, device=DEVICE)  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for tensor in cache.tensors:
        tensor.copy_(torch.randint(-99, 99, tensor.shape, generator=generator))
    return cache


@pytest.fixture
def one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "in_one_launch", lambda device: True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("latent", [False, True], ids=["", "latent"])
def test_a_launch_copies_what_loops_do(dtype: torch.dtype, latent: bool) -> None:
    cache, wanted = filled(dtype, latent=latent), filled(dtype, latent=latent)
    for tensor in wanted.tensors:
        for a, b in PAIRS:
            tensor[b] = tensor[a]
    pages.copy_pages(cache.tensors, cache.tensors, PAIRS)
    assert all(torch.equal(a, b) for a, b in zip(cache.tensors, wanted.tensors, strict=True))
    pages.copy_pages(cache.tensors, cache.tensors, [])


@pytest.mark.parametrize("groups", [None, [[0, 1], [2, 3]]], ids=["one group", "two groups"])
def test_the_prefix_cache_gives_back_what_it_was_given(groups: list[list[int]] | None, one_launch: None) -> None:
    cache, prompt = filled(torch.float32, groups=groups), list(range(3, 73))
    prefix = PrefixCache(cache, 1 << 20)
    before = [tensor.clone() for tensor in cache.tensors]
    first = [Held(0, [4 + group, 9 - group, 2 * group]) for group in range(cache.groups)]
    prefix.save(prefix.match(("", 0), prompt, 69)[0], prompt, first, 70)
    chain, places = prefix.match(("", 0), prompt, 69)
    assert len(places) == 2
    second = [Held(0, [11 - group, 7 - group]) for group in range(cache.groups)]
    prefix.load(chain, places, second)
    for tensor, then in zip(cache.tensors, before, strict=True):
        for mine, theirs in zip(first, second, strict=True):
            assert torch.equal(tensor[theirs.pages], then[mine.pages[:2]])
        untouched = sorted(set(range(12)) - {page for held in second for page in held.pages})
        assert torch.equal(tensor[untouched], then[untouched])


@pytest.mark.parametrize("staged", [kv_cache.STAGED_BYTES, 1], ids=["at once", "page by page"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_go_out_in_one_copy_and_come_back_elsewhere(
    dtype: torch.dtype, staged: int, one_launch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "STAGED_BYTES", staged)
    cache = filled(dtype)
    before = [tensor[[3, 9, 5]].clone() for tensor in cache.tensors]
    saved = cache.take_out([3, 9, 5])
    assert all(torch.equal(a, b.cpu()) for a, b in zip(saved, before, strict=True))
    assert all(tensor.device.type == "cpu" for tensor in saved)
    cache.clear([3, 9, 5])
    cache.bring_in([7, 3, 2, 11], saved)
    assert all(torch.equal(a[[7, 3, 2]], b) for a, b in zip(cache.tensors, before, strict=True))


def test_each_is_one_launch_however_many_pages_and_layers(one_launch: None) -> None:
    cache, prompt = filled(torch.float32, groups=[[0, 1], [2, 3]]), list(range(3, 73))
    prefix = PrefixCache(cache, 1 << 20)
    held = [Held(0, [4, 9, 0]), Held(0, [5, 8, 2])]
    with counted() as launches:
        prefix.save(prefix.match(("", 0), prompt, 69)[0], prompt, held, 70)
        assert launches.kernels.total() == 1
        prefix.load(*prefix.match(("", 0), prompt, 69), held)
        assert launches.kernels.total() == 2
        cache.copy(PAIRS)
        assert launches.kernels.total() == 3
    sent = {"_pin_memory": 3, "_to_copy": 3}  # sent to a device: the table of each launch
    assert launches.operations == (sent if DEVICE.type == "cuda" else {})
