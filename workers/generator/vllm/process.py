"""The vLLM engine that a generator's config describes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from scheduler.links.configs import VllmConfig
from workers.generator.tokens.stop import text_decoder
from workers.generator.vllm.adapters import LoraLimits, other_rotation, targets
from workers.model.card import ModelCard
from workers.model.config import DecoderConfig, read_json
from workers.model.device import ModelDevice

if TYPE_CHECKING:
    from workers.generator.vllm.engine import VllmEngine


def vllm_engine(
    card: ModelCard, config: VllmConfig, where: ModelDevice, *, context: int, slots: int, threads: int
) -> VllmEngine:
    """An engine whose vLLM has answered its first requests. Raises VllmFailed."""
    # The HTTP client is imported only where there is a vLLM.
    from workers.generator.vllm.engine import VllmEngine
    from workers.generator.vllm.server import Launch, VllmFailed

    if where.device.type == "cpu" and not config.url and (why := not_on_cpu(card.config, where.dtype)):
        raise VllmFailed(f'{card.name}: {why}; let [generator] engine be "torch"')
    fields = read_json(card.path / "config.json")
    limits = LoraLimits(config.max_adapters, config.max_rank, fields["architectures"][0])
    launch = Launch(
        program=Path(config.program),
        model=card.path,
        targets=targets(card.config),
        context=context,
        slots=slots,
        limits=limits,
        dtype=str(where.dtype).removeprefix("torch."),
        threads=threads,
        kv_bytes=config.kv_bytes,
        cpu=where.device.type == "cpu",
        options=config.options,
        gpus=config.gpus.get(card.name, []),
    )
    engine = VllmEngine(
        card.config,
        card.eos_token_ids,
        slots=slots,
        context=context,
        limits=limits,
        folder=Path(config.folder, card.name.replace("/", "--")) if config.folder else None,
        launch=None if config.url else launch,
        url=config.url,
        decode_text=text_decoder(card.path),
        lossy_adapters=config.lossy_adapters,
        rounds=quantised(fields),
    )
    engine.wait_ready()
    return engine


def not_on_cpu(config: DecoderConfig, dtype: torch.dtype) -> str | None:
    """Why vLLM's CPU build cannot serve a model (docs/vllm.md), or would serve other numbers; None if it can."""
    if config.delta is not None and dtype != torch.bfloat16:
        return "vLLM computes a gated delta rule on a CPU in bfloat16 alone"
    if config.num_experts and not config.gate.gated:
        return "vLLM has no experts without a gate on a CPU"
    if config.fused_qkv:
        return "vLLM asks for the code of the checkpoint, which Weft does not run"
    return other_rotation(config)


def quantised(fields: Mapping[str, Any]) -> str:
    """The form in which vLLM computes with a quantised checkpoint, for people; the trainer has the same weights in
    bfloat16."""
    method = (fields.get("quantization_config") or {}).get("quant_method", "")
    return f"the checkpoint's {method} weights" if method else ""
