"""Attention over cached keys and values, against the plain formula; and that company changes no bit of it."""

import math

import pytest
import torch
from torch import Tensor

from workers.generator.kv_cache import DecodeAttend, KVCache

KV_HEADS, HEADS, HEAD_DIM, SLOTS, CONTEXT = 2, 6, 16, 12, 200


def filled_cache(seed: int = 0, dtype: torch.dtype = torch.float32) -> KVCache:
    cache = KVCache(layers=1, slots=SLOTS, kv_heads=KV_HEADS, context=CONTEXT, head_dim=HEAD_DIM, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*cache.k_SKCD, *cache.v_SKCD):
        tensor.normal_(generator=generator)
    return cache


def new_token(rows: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    q, k, v = (torch.randn(rows, n, HEAD_DIM, generator=generator) for n in heads)
    return q, k, v


def formula(q_HD: Tensor, k_KLD: Tensor, v_KLD: Tensor) -> Tensor:
    out = []
    for head in range(HEADS):
        kv = head // (HEADS // KV_HEADS)
        weights = torch.softmax(k_KLD[kv] @ q_HD[head] / math.sqrt(HEAD_DIM), 0)
        out.append(weights @ v_KLD[kv])
    return torch.stack(out)


def check_rows(slots: list[int], positions: list[int]) -> None:
    cache = filled_cache()
    q, k, v = new_token(len(slots))
    out = DecodeAttend(cache, slots, positions).attend(0, q, k, v)
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        assert torch.equal(cache.k_SKCD[0][slot, :, position], k[row])
        assert torch.equal(cache.v_SKCD[0][slot, :, position], v[row])
        keys, values = cache.k_SKCD[0][slot, :, : position + 1], cache.v_SKCD[0][slot, :, : position + 1]
        torch.testing.assert_close(out[row], formula(q[row], keys, values), atol=1e-6, rtol=1e-5)


def test_whole_span_in_order() -> None:
    check_rows([2, 3, 4, 5], [10, 0, 63, 40])


def test_rows_in_any_order_with_gaps() -> None:
    check_rows([7, 3, 4, 6], [5, 9, 0, 33])


def test_scattered_slots_are_gathered() -> None:
    check_rows([0, 11], [5, 9])


def test_lengths_of_several_buckets_up_to_the_context() -> None:
    check_rows([0, 1, 2, 3, 9, 11], [63, 64, 127, 128, 199, 192])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_is_the_same_bit_for_bit_in_any_company(threads: int) -> None:
    torch.set_num_threads(threads)
    slots, positions = [4, 0, 1, 9, 2, 3, 11, 8], [70, 3, 100, 199, 80, 127, 64, 12]
    q, k, v = new_token(8)
    together = DecodeAttend(filled_cache(), slots, positions).attend(0, q, k, v)
    for row in range(8):
        one = slice(row, row + 1)
        alone = DecodeAttend(filled_cache(), slots[one], positions[one]).attend(0, q[one], k[one], v[one])
        assert torch.equal(alone[0], together[row])
    torch.set_num_threads(1)


def test_prompts_are_stored_and_copied() -> None:
    cache = KVCache(layers=2, slots=4, kv_heads=KV_HEADS, context=32, head_dim=HEAD_DIM)
    _, k, v = new_token(5 + 3)
    for layer in range(2):
        cache.write(layer, 2, 0, k[:5], v[:5])
        cache.write(layer, 0, 4, k[5:], v[5:])
    assert torch.equal(cache.k_SKCD[1][0, :, 4:7].transpose(0, 1), k[5:])
    cache.copy_prefix(2, 3, 5)
    assert torch.equal(cache.v_SKCD[0][3], cache.v_SKCD[0][2])
    cache.clear(3)
    assert not cache.v_SKCD[0][3].any()
    assert cache.v_SKCD[0][2].any()


def test_bfloat16_is_as_exact_as_its_inputs() -> None:
    cache, (q, k, v) = filled_cache(dtype=torch.bfloat16), (tensor.bfloat16() for tensor in new_token(3))
    out = DecodeAttend(cache, [0, 2, 11], [5, 150, 64]).attend(0, q, k, v)
    for row, (slot, length) in enumerate([(0, 6), (2, 151), (11, 65)]):
        keys, values = cache.k_SKCD[0][slot, :, :length].float(), cache.v_SKCD[0][slot, :, :length].float()
        torch.testing.assert_close(out[row].float(), formula(q[row].float(), keys, values), atol=2e-2, rtol=2e-2)
