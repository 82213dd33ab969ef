"""The start-up test, and that both of its answers keep tenants apart to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.workers.model.models import ours, packed, random_adapter, reference
from workers.model import isolation
from workers.model.adapters.adapter import Adapter
from workers.model.attend import PackedAttend
from workers.model.decoder import Decoder
from workers.model.isolation import choose, probe
from workers.model.logprobs import target_logprobs
from workers.model.lora.base_mm import base_mm
from workers.model.lora.rows import LoraRows


def train(decoder: Decoder, tenants: list[tuple[list[int], Adapter]]) -> list[tuple[Tensor, Adapter]]:
    """Logprobs and gradients of each tenant; a tenant's tokens depend only on its lengths."""
    lengths = [n for own, _ in tenants for n in own]
    offsets = [0]
    for own, _ in tenants:
        offsets.append(offsets[-1] + sum(own))
    tokens = torch.cat([packed(own, 96, seed=sum(own))[0] for own, _ in tenants])
    grads = [Adapter.zeros(adapter.shape) for _, adapter in tenants]
    rows = LoraRows(offsets, [adapter for _, adapter in tenants], grads)
    positions = torch.cat([torch.arange(n) for n in lengths])
    hidden = decoder(tokens, positions, PackedAttend(lengths), rows)
    logprobs = target_logprobs(decoder, hidden, torch.arange(len(tokens)), (tokens * 7 + 3) % 96, rows, chunk=32)
    (logprobs * (tokens % 5 - 1.5)).sum().backward()
    return list(zip(logprobs.detach().split([sum(own) for own, _ in tenants]), grads, strict=True))


@pytest.mark.parametrize("width", [32, 24, 37, 33])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", ["moe", "qwen3"])
def test_after_settling_any_width_is_exact(width: int, threads: int, family: str, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        sizes = {"moe_intermediate_size": width} if family == "moe" else {"intermediate_size": width}
        decoder = ours(reference(family, **sizes), tmp_path)
        probe(decoder)
        mine = ([33, 2, 9], random_adapter(decoder, 4, seed=1))
        small = ([3], random_adapter(decoder, 7, seed=2))
        others = [([5, 30], random_adapter(decoder, 8, seed=3)), ([200], random_adapter(decoder, 4, seed=4))]
        crowd = train(decoder, [others[0], mine, others[1], small])
        for place, tenant in ((1, mine), (3, small)):
            [(logprobs, grad)] = train(decoder, [tenant])
            assert torch.equal(crowd[place][0], logprobs)
            assert torch.equal(crowd[place][1].flat, grad.flat)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("family", ["moe", "moe-mixed", "llama-tied", "deepseek"])
def test_group_by_group_agrees_with_packed_and_is_exact(family: str, tmp_path: Path) -> None:
    decoder = ours(reference(family), tmp_path)
    tenants = [
        ([33, 2, 9], random_adapter(decoder, 4, seed=1)),
        ([1], random_adapter(decoder, 2, seed=2, train_mlp=False)),
        ([17], random_adapter(decoder, 4, seed=3, train_attn=False)),
    ]
    together = train(decoder, tenants)
    decoder.isolation = "per-segment"
    crowd = train(decoder, tenants)
    for tenant, packed_result, apart in zip(tenants, together, crowd, strict=True):
        torch.testing.assert_close(apart[0], packed_result[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(apart[1].flat, packed_result[1].flat, atol=2e-4, rtol=1e-4)
        [alone] = train(decoder, [tenant])
        assert torch.equal(apart[0], alone[0])
        assert torch.equal(apart[1].flat, alone[1].flat)


def test_a_library_that_rounds_by_batch_size_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = ours(reference("moe"), tmp_path)

    def fickle(x: Tensor, weight: Tensor, *, transposed: bool = False) -> Tensor:
        y = base_mm(x, weight, transposed=transposed)
        return y * 1.0000002 if len(x) == 33 and transposed else y

    monkeypatch.setattr(isolation, "base_mm", fickle)
    found = choose(decoder)
    assert found.mode == "per-segment"
    assert "33 rows" in found.reason
    assert "group by group" in str(found)
    monkeypatch.undo()
    assert probe(decoder) == choose(decoder)


def test_the_answer_is_the_decoders(tmp_path: Path) -> None:
    decoder = ours(reference("moe"), tmp_path)
    rows = LoraRows([0, 3], [random_adapter(decoder, 2, seed=1)])
    assert decoder.arranged(rows) is rows
    decoder.isolation = "per-segment"
    arranged = decoder.arranged(rows)
    assert arranged is not None
    assert arranged.apart
    assert decoder.arranged(arranged) is arranged
    assert arranged.select(torch.tensor([0, 2])).apart
    cuts = LoraRows([0, 2, 3], [None, None], apart=True).slices(8)
    assert [(a, b) for a, b, _ in cuts] == [(0, 2), (2, 3)]


def test_positions_have_the_same_angles_in_any_batch(tmp_path: Path) -> None:
    decoder = ours(reference("llama-tied", max_position_embeddings=2048), tmp_path)
    late = decoder.rotary(torch.tensor([700, 3, 300]))
    for at, position in enumerate((700, 3, 300)):
        for one, many in zip(decoder.rotary(torch.tensor([position])), late, strict=True):
            assert torch.equal(one[0], many[at])
    exact = torch.tensor([700.0])[:, None] * decoder.rotary.inverse_wavelengths
    torch.testing.assert_close(late[0][0, 0, : exact.shape[1]], exact[0].cos())


def test_what_was_found_is_kept_for_the_same_weights_and_threads_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials: list[int] = []

    def trial(decoder: Decoder, shapes: list[torch.Tensor]) -> isolation.Isolation:
        trials.append(torch.get_num_threads())
        return isolation.Isolation("per-segment", 3, "a difference")

    monkeypatch.setattr(isolation, "choose", trial)
    before, kept = torch.get_num_threads(), tmp_path / "kept"
    try:
        torch.set_num_threads(1)
        decoder = ours(reference("moe"), tmp_path / "one")
        first = probe(decoder, kept)
        decoder.isolation = ""
        assert probe(decoder, kept) == first == isolation.Isolation("per-segment", 3, "a difference")
        assert decoder.isolation == "per-segment"
        assert len(trials) == 1
        probe(ours(reference("moe", moe_intermediate_size=40), tmp_path / "two"), kept)
        torch.set_num_threads(2)
        probe(decoder, kept)
        assert trials == [1, 1, 2]
        torch.set_num_threads(1)
        for file in kept.iterdir():
            file.write_bytes(file.read_bytes()[:10])
        assert probe(decoder, kept) == first
        assert trials == [1, 1, 2, 1]
    finally:
        torch.set_num_threads(before)
