"""The whole decoder by the CUDA code against the CPU code. On the CPU its linears and experts replace the CPU's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.workers.model.gpu_kit import (
    CONFIG,
    DENSE,
    DEVICE,
    GROUPS,
    HOST,
    SINKS,
    assert_same_grads,
    mixed_rows,
    random_decoder,
    twice,
)
from workers.model.attend import PackedAttend
from workers.model.config import DecoderConfig
from workers.model.decoder import Decoder
from workers.model.gpu.varlen import VarlenAttend
from workers.model.logprobs import target_logprobs
from workers.model.lora import products as lora_products
from workers.model.lora.rows import LoraRows

LENGTHS = [3, 20, 20, 7, 18, 1]
TOLERANCE = 1e-4 if DEVICE.type == "cpu" else 5e-3


def run(decoder: Decoder, rows: LoraRows) -> Tensor:
    """Logprobs of every token; their weighted sum is differentiated."""
    device = decoder.device
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, CONFIG.vocab_size, (sum(LENGTHS),), generator=generator)
    weights = torch.randn(len(tokens), generator=generator).to(device)
    positions = torch.cat([torch.arange(n) for n in LENGTHS]).to(device)
    hidden = decoder(tokens.to(device), positions, PackedAttend(LENGTHS), rows)
    every = torch.arange(len(tokens), device=device)
    logprobs = target_logprobs(decoder, hidden, every, ((tokens * 7 + 3) % 80).to(device), rows, chunk=32)
    (logprobs * weights).sum().backward()
    return logprobs.detach()


def use_gpu_code(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lora_products, "on_device", lambda weight: True)


KEPT, RECOMPUTED = None, 0


@pytest.mark.parametrize(
    ("config", "budget"),
    [
        pytest.param(CONFIG, KEPT, id="kept-moe"),
        pytest.param(DENSE, KEPT, id="kept-dense"),
        pytest.param(SINKS, RECOMPUTED, id="recomputed-sinks"),
        pytest.param(GROUPS, RECOMPUTED, id="recomputed-groups"),
        pytest.param(CONFIG, RECOMPUTED, id="recomputed-moe", marks=pytest.mark.long),
        pytest.param(DENSE, RECOMPUTED, id="recomputed-dense", marks=pytest.mark.long),
        pytest.param(SINKS, KEPT, id="kept-sinks", marks=pytest.mark.long),
        pytest.param(GROUPS, KEPT, id="kept-groups", marks=pytest.mark.long),
    ],
)
def test_decoder_through_the_gpu_code(
    config: DecoderConfig, budget: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = twice(mixed_rows(config, (3, 0, 40, 7, 18, 1)))
    decoder = random_decoder(config, DEVICE)
    decoder.activation_budget_bytes = budget
    with monkeypatch.context() as patch:
        if DEVICE.type == "cpu":
            use_gpu_code(patch)
        found = run(decoder, ours)
    if DEVICE.type == "cuda":
        decoder = random_decoder(config, HOST)
    wanted = run(decoder, theirs)
    torch.testing.assert_close(found.cpu(), wanted, atol=TOLERANCE, rtol=TOLERANCE)
    assert_same_grads(ours.grads, theirs.grads, 10 * TOLERANCE)


def reference_varlen(
    q: Tensor, k: Tensor, v: Tensor, bounds_q: Tensor, bounds_k: Tensor, window_size: tuple[int, int]
) -> Tensor:
    assert bounds_q is bounds_k
    assert bounds_q.dtype == torch.int32
    assert window_size == (-1, 0)
    outs = []
    for a, b in zip(bounds_q.tolist(), bounds_q.tolist()[1:], strict=False):
        parts = (t[a:b].transpose(0, 1) for t in (q, k, v))
        outs.append(F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True).transpose(0, 1))
    return torch.cat(outs)


def test_varlen_attention_is_asked_in_the_words_of_the_installed_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(12, heads, 8, generator=generator) for heads in (4, 2, 2))
    asked: list[dict[str, Any]] = []

    def torch_211(q: Any, k: Any, v: Any, cq: Any, ck: Any, mq: int, mk: int, *, window_size: Any) -> Tensor:
        assert mq == mk == 7
        asked.append({})
        return reference_varlen(q, k, v, cq, ck, window_size)

    def torch_213(
        q: Any,
        k: Any,
        v: Any,
        cq: Any,
        ck: Any,
        mq: int,
        mk: int,
        *,
        window_size: Any,
        enable_gqa: bool = False,
        num_splits: int | None = None,
    ) -> Tensor:
        asked.append({"enable_gqa": enable_gqa, "num_splits": num_splits})
        return reference_varlen(q, k, v, cq, ck, window_size)

    wanted = PackedAttend([5, 7]).attend(0, q, k, v)
    for attention in (torch_211, torch_213):
        torch.testing.assert_close(VarlenAttend([5, 7], attention)(q, k, v), wanted)
    assert asked == [{}, {"enable_gqa": True, "num_splits": 1}]

    def without_splits(*args: Any, num_splits: int | None = None, **options: Any) -> Tensor:
        if num_splits is not None:
            raise RuntimeError("num_splits is not supported with this backend.")
        return torch_211(*args, **options)

    attend = VarlenAttend([5, 7], without_splits)
    for _ in range(2):
        torch.testing.assert_close(attend(q, k, v), wanted)
    with pytest.raises(RuntimeError, match="out of memory"):
        VarlenAttend([5, 7], out_of_memory)(q, k, v)


def out_of_memory(*args: Any, num_splits: int | None = None, **options: Any) -> Tensor:
    raise RuntimeError("CUDA out of memory")


def test_the_installed_varlen_attention_has_the_parameters_we_pass() -> None:
    attend = VarlenAttend([2])
    assert attend._options.keys() <= {"num_splits"}
    from inspect import signature

    assert "window_size" in signature(attend._attention).parameters
