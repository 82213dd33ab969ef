"""Computing layers again in the backward gives the same bits with less memory; and when that is chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.workers.model.models import ours, packed, random_adapter, reference
from workers.model import decoder as decoder_module
from workers.model.adapters.adapter import Adapter
from workers.model.attend import PackedAttend
from workers.model.decoder import Decoder
from workers.model.logprobs import target_logprobs
from workers.model.lora.rows import LoraRows
from workers.model.memory import Saving, choose_saving, free_bytes
from workers.model.planning.check import kept_bytes

CPU = torch.device("cpu")
WHERE, GPU = (CPU, torch.float32), (torch.device("cuda"), torch.float32)


@dataclass(frozen=True)
class Forward:
    """A decoder's output for `tokens`, the bytes that autograd keeps for the backward, and the calls of on_route."""

    tokens: Tensor
    rows: LoraRows
    hidden: Tensor
    kept_bytes: int
    told: list[tuple[int, list[int]]]


def forward(decoder: Decoder, lengths: list[int]) -> Forward:
    tokens, positions = packed(lengths, 96, seed=1)
    adapters = [random_adapter(decoder, 4, seed=1), random_adapter(decoder, 3, seed=2, train_attn=False)]
    rows = LoraRows([0, lengths[0], sum(lengths)], adapters, [Adapter.zeros(adapter.shape) for adapter in adapters])
    weights = {weight.untyped_storage().data_ptr() for weight in [*decoder.parameters(), *(a.flat for a in adapters)]}
    kept: dict[int, int] = {}
    told: list[tuple[int, list[int]]] = []

    def keep(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        hidden = decoder(
            tokens, positions, PackedAttend(lengths), rows, lambda at, experts: told.append((at, experts.tolist()))
        )
    return Forward(tokens, rows, hidden, sum(kept.values()), told)


def train(decoder: Decoder, lengths: list[int]) -> tuple[Tensor, list[Tensor], int, list[tuple[int, list[int]]]]:
    """Logprobs, gradients, the bytes that autograd kept between forward and backward, and the calls of on_route."""
    done = forward(decoder, lengths)
    tokens = done.tokens
    logprobs = target_logprobs(decoder, done.hidden, torch.arange(len(tokens)), (tokens * 7 + 3) % 96, done.rows)
    (logprobs * (tokens % 5 - 1.5)).sum().backward()
    return logprobs.detach(), [grad.flat for grad in done.rows.grads if grad], done.kept_bytes, done.told


@pytest.mark.parametrize("family", ["moe", "moe-mixed", "qwen3", "llama-tied"])
@pytest.mark.parametrize("isolation", ["padded", "per-segment"])
def test_recomputing_changes_no_bit_and_keeps_less(family: str, isolation: str, tmp_path: Path) -> None:
    decoder = ours(reference(family), tmp_path)
    decoder.isolation = isolation
    plain = train(decoder, [120, 9])
    decoder.activation_budget_bytes = 0
    frugal = train(decoder, [120, 9])
    assert torch.equal(plain[0], frugal[0])
    for one, other in zip(plain[1], frugal[1], strict=True):
        assert torch.equal(one, other)
    assert plain[3] == frugal[3]
    assert frugal[2] < plain[2] / 4


def test_inputs_kept_on_the_host_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = ours(reference("moe"), tmp_path)
    plain = train(decoder, [120, 9])
    monkeypatch.setattr(decoder_module, "choose_saving", lambda *_: Saving.OFFLOAD)
    monkeypatch.setattr(decoder_module, "save_on_cpu", lambda pin_memory: torch.autograd.graph.save_on_cpu())
    offloaded = train(decoder, [120, 9])
    assert torch.equal(plain[0], offloaded[0])
    assert all(torch.equal(one, other) for one, other in zip(plain[1], offloaded[1], strict=True))


@pytest.mark.parametrize("family", ["moe", "moe-wide", "qwen3"])
def test_the_estimate_is_near_what_is_kept(family: str, tmp_path: Path) -> None:
    decoder = ours(reference(family), tmp_path)
    kept = forward(decoder, [120, 9]).kept_bytes
    estimate = 129 * decoder.config.num_layers * kept_bytes(decoder.config)
    assert 0.5 < estimate / kept < 2


def test_the_choice_follows_the_memory_at_hand(tmp_path: Path) -> None:
    config = ours(reference("qwen3"), tmp_path).config
    one = config.num_layers * kept_bytes(config)
    assert choose_saving(config, 1000, WHERE) is Saving.KEEP
    assert choose_saving(config, 1000, WHERE, 1000 * one) is Saving.KEEP
    assert choose_saving(config, 1001, WHERE, 1000 * one) is Saving.RECOMPUTE
    assert choose_saving(config, 1001, GPU, 1000 * one) is Saving.RECOMPUTE
    assert choose_saving(config, 1000, WHERE, 1000) is Saving.RECOMPUTE
    assert choose_saving(config, 1000, GPU, 1000) is Saving.OFFLOAD
    large = replace(config, num_layers=10**6, hidden_size=4096)
    assert choose_saving(large, 1 << 20, WHERE) is Saving.RECOMPUTE
    assert 0 < free_bytes(CPU) < 1 << 50
