"""Where the CUDA code is tested: on the device if there is one, otherwise on the CPU in Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from workers.model.adapters.adapter import Adapter
from workers.model.adapters.shape import AdapterShape
from workers.model.config import DecoderConfig, GateConfig, RopeConfig, RouterConfig
from workers.model.decoder import Decoder
from workers.model.lora.rows import LoraRows

#: Triton reads this when a kernel is defined, so it must be set before the kernels are imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton", reason="Triton is not installed")


if not torch.cuda.is_available():
    pytest.importorskip("triton", "3.7", reason="the interpreter of Triton before 3.7 cannot read NumPy 2.4's arrays")
    from tests.workers.model.interpreter import interpret_library, multiply_bfloat16, work_once

    interpret_library()
    multiply_bfloat16()
    work_once()

HOST = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

CONFIG = DecoderConfig(
    architecture="Qwen3MoeForCausalLM",
    vocab_size=80,
    hidden_size=40,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=24,
    intermediate_size=72,
    context_length=128,
    num_experts=5,
    experts_per_token=2,
    moe_intermediate_size=24,
)
#: Configs with the features of gpt-oss, and with those of GLM-4.5.
SINKS = replace(
    CONFIG, num_layers=2, sinks=True, window=20, window_layers=(1,), qk_norm="", qkv_bias=True, o_bias=True,
    expert_bias=True, gate=GateConfig(1.0, 1.702), router=RouterConfig("chosen", bias=True),
    rope=RopeConfig(kind="yarn", factor=4.0, original_context_length=32, attention_factor=1.1),
)  # fmt: skip
GROUPS = replace(
    CONFIG, num_layers=2, dense_layers=(0,), num_experts=6, qkv_bias=True, norm_topk=True, shared_intermediate_size=24,
    router=RouterConfig("sigmoid", True, 3, 2, 2.5), rope=RopeConfig(partial=0.5),
)  # fmt: skip
DENSE = DecoderConfig(**{**CONFIG.__dict__, "architecture": "Qwen3ForCausalLM", "num_experts": 0})


def random_decoder(config: DecoderConfig, device: torch.device = HOST, dtype: torch.dtype = torch.float32) -> Decoder:
    """A decoder of random weights, which are the same on every device."""
    decoder, generator = Decoder(config, dtype, device), torch.Generator().manual_seed(7)
    for weight in decoder.parameters():
        std = 1.0 if weight.ndim == 1 else 1.5 / weight.shape[-1] ** 0.5
        weight.data.copy_(std * torch.randn(weight.shape, generator=generator))
    return decoder


def adapter(config: DecoderConfig, rank: int, seed: int, **targets: bool) -> Adapter:
    """An adapter without a factor of zeros."""
    made = Adapter.init(AdapterShape(config, rank, **targets), seed, scale=0.5 + seed, device=DEVICE)
    generator = torch.Generator().manual_seed(seed)
    for slot in made.shape.slots.values():
        if not slot.fan_in:
            made.view(slot.name).copy_(0.3 * torch.randn(slot.shape, generator=generator))
    return made


def gradient(of: Adapter, seed: int) -> Adapter:
    """An arena that already holds a gradient, as it does for a second microbatch."""
    generator = torch.Generator().manual_seed(100 + seed)
    return Adapter(of.shape, torch.randn(of.flat.shape, generator=generator).to(DEVICE), of.scale)


def twice(rows: LoraRows) -> tuple[LoraRows, LoraRows]:
    """The same rows twice, each with its own gradient arenas: on the device, and in the host's memory, where no kernel
    of the device computes. Groups that share an arena still share one."""

    def moved(device: torch.device) -> LoraRows:
        made: dict[int, Adapter] = {}

        def move(of: Adapter | None) -> Adapter | None:
            if of is None:
                return None
            if id(of) not in made:
                made[id(of)] = Adapter(of.shape, of.flat.to(device, copy=True), of.scale)
            return made[id(of)]

        return LoraRows(rows.offsets, [move(a) for a in rows.adapters], [move(g) for g in rows.grads])

    return moved(DEVICE), moved(HOST)


def assert_same_grads(found: Sequence[Adapter | None], wanted: Sequence[Adapter | None], tolerance: float) -> None:
    """Compare name by name, relative to the largest entry; `wanted` were computed in the host's memory."""
    for group, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        if ours is None or theirs is None:
            assert ours is theirs
            continue
        for name, view in ours.views.items():
            expected = theirs.views[name]
            assert expected.device == HOST, "the reference is the CPU's"
            error = (view.cpu() - expected).abs().max() / expected.abs().max()
            assert error < tolerance, f"group {group}: {name} differs by {float(error):.1e}"


def mixed_rows(config: DecoderConfig, sizes: Sequence[int] = (3, 0, 40, 7, 18, 1)) -> LoraRows:
    """Groups of uneven length: mixed ranks, also beyond one block, an empty group, one without an adapter, one that is
    not trained, and two that share an adapter and its arena."""
    ranks = [4, 8, 20, None, 4, 1]
    adapters = [adapter(config, rank, seed) if rank else None for seed, rank in enumerate(ranks)]
    grads = [gradient(of, seed) if of else None for seed, of in enumerate(adapters)]
    adapters[4], grads[4] = adapters[0], grads[0]
    grads[5] = None
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + size)
    return LoraRows(offsets, adapters, grads)
