"""Seated adapters: the same numbers as one by one, and the same bits whoever decodes beside."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.workers.model.models import ours, random_adapter, reference
from workers.model import adapter_pool
from workers.model.adapter import Adapter
from workers.model.adapter_pool import AdapterPool
from workers.model.decoder import Decoder, LoraRows


class AttendSelf:
    """Every token sees only itself: enough for a decode step without a cache."""

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        return v_TKD.repeat_interleave(q_THD.shape[1] // v_TKD.shape[1], dim=1)


@torch.inference_mode()
def decode(decoder: Decoder, tokens: list[int], offsets: list[int], adapters: list[Adapter | None]) -> Tensor:
    rows = LoraRows(offsets, adapters)
    ids = torch.tensor(tokens)
    return decoder.logits(decoder(ids, ids % 7, AttendSelf(), rows), rows)


@pytest.mark.parametrize("family", ["moe", "moe-mixed", "qwen3"])
def test_seated_adapters_decode_as_others_do(family: str, tmp_path: Path) -> None:
    decoder, pool = ours(reference(family), tmp_path), AdapterPool()
    adapters: list[Adapter | None] = [
        random_adapter(decoder, 4, seed=1),
        random_adapter(decoder, 4, seed=2, scale=0.5),
        None,
        random_adapter(decoder, 3, seed=3, train_attn=False),
        random_adapter(decoder, 2, seed=4, train_mlp=False, train_unembed=False),
    ]
    seated = [None if adapter is None else pool.seat(adapter) for adapter in adapters]
    offsets, tokens = [0, 1, 3, 4, 9, 10], list(range(10))
    expected = decode(decoder, tokens, offsets, adapters)
    torch.testing.assert_close(decode(decoder, tokens, offsets, seated), expected, atol=3e-5, rtol=1e-5)
    mixed = [*seated[:1], *adapters[1:]]
    torch.testing.assert_close(decode(decoder, tokens, offsets, mixed), expected, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("place", [0, 20, 39])
def test_a_decoded_row_is_the_same_bits_in_any_company(place: int, tmp_path: Path) -> None:
    decoder, pool = ours(reference("moe"), tmp_path), AdapterPool()
    mine = pool.seat(random_adapter(decoder, 4, seed=1))
    others = [pool.seat(random_adapter(decoder, rank, seed=rank)) for rank in (4, 4, 7)]
    alone = decode(decoder, [5], [0, 1], [mine])
    crowd: list[Adapter | None] = [others[i % 3] if i % 4 else mine for i in range(40)]
    crowd[place] = mine
    tokens = [11 * i % 96 for i in range(40)]
    tokens[place] = 5
    assert torch.equal(decode(decoder, tokens, list(range(41)), crowd)[place], alone[0])


def test_seats_are_reused_and_blocks_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, pool = ours(reference("qwen3"), tmp_path), AdapterPool()
    adapter = random_adapter(decoder, 2, seed=1)
    monkeypatch.setattr(adapter_pool, "BLOCK_BYTES", 3 * 4 * adapter.shape.numel)
    held = [pool.seat(adapter) for _ in range(4)]
    seats = [a.seat for a in held]
    assert all(seat is not None for seat in seats)
    assert [seat.index for seat in seats if seat] == [0, 1, 2, 0]
    freed = held.pop(1)
    del freed
    again = pool.seat(random_adapter(decoder, 2, seed=5))
    assert again.seat is not None
    assert again.seat.index == 1
    assert torch.equal(held[0].flat, adapter.flat)
    assert not torch.equal(again.flat, adapter.flat)


def test_other_ranks_and_models_get_their_own_block(tmp_path: Path) -> None:
    decoder, pool = ours(reference("qwen3"), tmp_path), AdapterPool()
    one, two = pool.seat(random_adapter(decoder, 2, seed=1)), pool.seat(random_adapter(decoder, 3, seed=1))
    other_shape = replace(one.shape, config=replace(decoder.config, vocab_size=97))
    three = pool.seat(Adapter.zeros(other_shape))
    assert len({id(a.seat.block) for a in (one, two, three) if a.seat}) == 3
