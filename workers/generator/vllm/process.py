"""The vLLM engine that a generator's config describes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from scheduler.links.configs import VllmConfig
from workers.generator.stop import text_decoder
from workers.generator.vllm.adapters import LoraLimits, targets
from workers.model.card import ModelCard
from workers.model.device import ModelDevice

if TYPE_CHECKING:
    from workers.generator.vllm.engine import VllmEngine


def vllm_engine(
    card: ModelCard, config: VllmConfig, where: ModelDevice, *, context: int, slots: int, threads: int
) -> VllmEngine:
    """An engine whose vLLM has answered its first requests. Raises VllmFailed."""
    # Its HTTP client is imported where there is a vLLM only.
    from workers.generator.vllm.engine import VllmEngine
    from workers.generator.vllm.server import Launch

    limits = LoraLimits(config.max_adapters, config.max_rank)
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
        folder=Path(config.folder, card.name.replace("/", "--")),
        launch=None if config.url else launch,
        url=config.url,
        decode_text=text_decoder(card.path),
        lossy_adapters=config.lossy_adapters,
    )
    engine.wait_ready()
    return engine
