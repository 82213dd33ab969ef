"""What a device computes between products in one kernel, against torch's own operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.workers.model.gpu_kit import (
    CONFIG,
    DEVICE,
    HOST,
    adapter,
    assert_same_grads,
    gradient,
    mixed_rows,
    random_decoder,
    twice,
)
from tests.workers.model.models import ours, reference
from tests.workers.model.test_memory import forward
from workers.model import logprobs
from workers.model.config import RopeConfig
from workers.model.gpu import softmax
from workers.model.gpu.combine import combined, spread
from workers.model.gpu.heads import Heads
from workers.model.gpu.norms import add_norm
from workers.model.logprobs import target_logprobs
from workers.model.lora import products as lora_products
from workers.model.lora.rows import LoraRows
from workers.model.parts.rotary import Rotary, turn
from workers.model.planning.check import kept_bytes, kept_on_device

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("normed", [True, False])
def test_heads_are_normed_and_turned(dtype: torch.dtype, partial: float, normed: bool) -> None:
    """More rows than a block has, of a width that is no power of two."""
    h, k, dim, tokens = 11, 3, 24, 5
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(tokens, (h + 2 * k) * dim, generator=generator)
    norms = [torch.rand(dim, generator=generator) + 0.5 if normed else None for _ in range(2)]
    angles = Rotary(RopeConfig(partial=partial), dim, 64)(torch.tensor([0, 7, 3, 50, 1]))
    grads = [torch.randn(tokens, n, dim, generator=generator) for n in (h, k, k)]

    def expected(x: Tensor) -> list[Tensor]:
        q, keys, v = (part.view(tokens, -1, dim) for part in x.split([h * dim, k * dim, k * dim], dim=1))
        rooted = [F.rms_norm(t, (dim,), n, 1e-6) if n is not None else t for t, n in zip((q, keys), norms, strict=True)]
        return [*(turn(t, angles) for t in rooted), v]

    plain = qkv.clone().requires_grad_()
    wanted = expected(plain)
    torch.autograd.backward(wanted, grads)
    ours = qkv.to(DEVICE)
    moved = [None if n is None else n.to(DEVICE) for n in norms]
    cos, sin = (each.to(DEVICE) for each in angles)
    bias = torch.randn(qkv.shape[1], generator=generator).to(DEVICE)
    heads = Heads((h, k), dim, (moved[0], moved[1]), 1e-6, (cos, sin), dtype, bias)
    found = heads.forward(ours.sub_(bias))
    gradient_of_ours = heads.backward(ours, *(grad.to(DEVICE, dtype) for grad in grads))
    for mine, other in zip(found, wanted, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.cpu().float(), other, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert gradient_of_ours.dtype == dtype
    assert plain.grad is not None
    torch.testing.assert_close(
        gradient_of_ours.cpu().float(), plain.grad, atol=4 * TOLERANCE[dtype], rtol=4 * TOLERANCE[dtype]
    )


@pytest.mark.parametrize("wide", [3, 1500])
@pytest.mark.parametrize("added", [True, False])
def test_the_hidden_state_is_added_to_and_normed(added: bool, wide: int) -> None:
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(7, wide, generator=generator) for _ in range(1 + added)]
    weight = torch.rand(wide, generator=generator) + 0.5
    grads = [torch.randn(7, wide, generator=generator) for _ in range(2)]

    def run(norm: Callable[..., tuple[Tensor, Tensor]], device: torch.device) -> list[Tensor]:
        own = [each.to(device).requires_grad_() for each in given]
        found = norm(own[0], own[1] if added else None, weight.to(device), 1e-6)
        torch.autograd.backward(found, [grad.to(device) for grad in grads])
        return [each.detach().cpu() for each in (*found, *(each.grad for each in own)) if each is not None]

    def plain(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = 1 * x if delta is None else x + delta
        return total, F.rms_norm(total, weight.shape, weight, eps)

    def ours(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_norm(x, delta, weight, eps, torch.float32)

    for mine, other in zip(run(ours, DEVICE), run(plain, HOST), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)
    whole = add_norm(given[0].to(DEVICE), None, weight.to(DEVICE), 1e-6, torch.float32)[1]
    rounded = add_norm(given[0].to(DEVICE), None, weight.to(DEVICE), 1e-6, torch.bfloat16)[1]
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), whole, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wide", [3, 1500])
def test_what_experts_give_is_put_together(dtype: torch.dtype, wide: int) -> None:
    generator = torch.Generator().manual_seed(0)
    y, weights = torch.randn(21, wide, generator=generator).to(dtype), torch.rand(7, 3, generator=generator)
    inverse = torch.randperm(21, generator=generator)
    of_tokens = y.float()[inverse].view(7, 3, wide)
    placed = y.to(DEVICE), inverse.to(DEVICE)
    torch.testing.assert_close(combined(*placed, 3).cpu(), of_tokens.sum(1))
    found = combined(*placed, 3, weights.to(DEVICE))
    torch.testing.assert_close(found.cpu(), (of_tokens * weights[:, :, None]).sum(1))
    assert combined(placed[0][:0], placed[1][:0], 3).shape == (0, wide)
    token = torch.randint(0, 21, (133,), generator=generator)
    assert torch.equal(spread(placed[0], token.to(DEVICE)).cpu(), y[token])
    assert spread(placed[0], placed[1][:0]).shape == (0, wide)


@pytest.mark.parametrize(
    ("dtype", "temperature", "adapted"),
    [(torch.float32, True, True), (torch.bfloat16, False, True), (torch.float32, False, False)],
    ids=["tempered", "bfloat16", "base alone"],
)
def test_logprobs_over_more_than_a_block_has(
    dtype: torch.dtype, temperature: bool, adapted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vocabulary has several splits, the last block not full. Rows have several targets, among them its first and
    last token, and one twice. Adapters have three rank classes, one has no unembedding; some rows have none."""
    config = replace(CONFIG, vocab_size=601)
    mixed = mixed_rows(config)
    elsewhere = adapter(config, 8, 6, train_unembed=False)
    offsets = [*mixed.offsets, mixed.offsets[-1] + 5]
    adapters, grads = [*mixed.adapters, elsewhere], [*mixed.grads, gradient(elsewhere, 6)]
    on_device, on_host = twice(LoraRows(offsets, adapters, grads) if adapted else LoraRows(offsets, [None] * 7))
    rows = len(on_host)
    generator = torch.Generator().manual_seed(0)
    hidden = 3 * torch.randn(rows, config.hidden_size, generator=generator)
    targets = torch.randint(0, config.vocab_size, (rows, 3), generator=generator)
    targets[:, 1] = torch.tensor([0, 600, 127, 128, 512])[torch.arange(rows) % 5]
    targets[::7, 2] = targets[::7, 0]
    chosen = torch.arange(3 * rows) % 4 != 3  # two of some rows, three of others
    every = torch.arange(rows).repeat_interleave(3)[chosen]
    divisor = torch.rand(rows, generator=generator) + 0.5 if temperature else None
    dlogprobs = torch.randn(len(every), generator=generator)

    def run(place: torch.device, of: LoraRows) -> tuple[Tensor, Tensor]:
        own = hidden.to(place, copy=True).requires_grad_()
        found = target_logprobs(
            random_decoder(config, place, dtype),
            own,
            every.to(place),
            targets.flatten()[chosen].to(place),
            of,
            chunk=64,
            temperature_T=None if divisor is None else divisor.to(place),
        )
        found.backward(dlogprobs.to(place))  # type: ignore[no-untyped-call]
        assert own.grad is not None
        return found.detach().cpu(), own.grad.cpu()

    wanted = run(HOST, on_host)
    monkeypatch.setattr(lora_products, "on_device", lambda weight: True)
    monkeypatch.setattr(softmax, "SPLIT", 256)
    bits, recomputed = [], twice(on_device)[0]
    for room, of in ((64, recomputed), (1 << 40, on_device)):  # logits are kept of the first chunk only, and of all
        monkeypatch.setattr(logprobs._Head, "room", lambda head, room=room: room)
        found = run(DEVICE, of)
        bits.append([*found, *(grad.flat.cpu() for grad in of.grads if grad is not None)])
    assert all(torch.equal(some, every) for some, every in zip(*bits, strict=True)), (
        "kept logits are those computed again"
    )
    close = 1e-4 if dtype == torch.float32 else 3e-2
    for mine, other in zip(found, wanted, strict=True):
        assert (mine - other).abs().max() < close * other.abs().max()
    assert_same_grads(on_device.grads, on_host.grads, close)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="what is kept is counted in the host's memory")
@pytest.mark.parametrize("family", ["moe", "moe-wide"])
def test_the_estimate_is_near_what_a_device_keeps(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = ours(reference(family), tmp_path)
    monkeypatch.setattr(lora_products, "on_device", lambda weight: True)
    kept = forward(decoder, [40, 9]).kept_bytes
    estimate = 49 * decoder.config.num_layers * kept_on_device(decoder.config, 4)
    assert 0.5 < estimate / kept < 2
    assert estimate < 49 * decoder.config.num_layers * kept_bytes(decoder.config)
