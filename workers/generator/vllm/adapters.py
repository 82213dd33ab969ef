"""Adapters in the form that vLLM reads, and the reasons why one cannot be served.

vLLM silently drops tensors that it cannot use, so what it can serve is decided here, before it sees any: attention and
MLP (experts too) up to the rank it was started with, with finite values. A folder is written whole under a name that is
never used again, so its contents never change.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from store.blobs.contract import Damaged, Weights, reading
from workers.generator.adapters import GONE, AdapterUnusable
from workers.model.adapters.adapter import Adapter, AdapterFileError, load_adapter, version_of
from workers.model.adapters.peft_format import write_peft
from workers.model.config import DecoderConfig
from workers.model.families.table import FAMILIES as TABLE, Layout

#: The ranks vLLM makes room for; an adapter of another rank takes as much as the next higher one.
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


#: Families whose adapters vLLM serves correctly (docs/vllm.md): it silently drops tensors whose names it does not know.
FAMILIES = (
    *("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"),
    *("Qwen3MoeForCausalLM", "MixtralForCausalLM", "OlmoeForCausalLM", "Glm4MoeForCausalLM", "DeepseekV3ForCausalLM"),
)


class NotServable(AdapterUnusable):
    """vLLM cannot serve these weights, though another engine may. The message says why."""


@dataclass(frozen=True)
class LoraLimits:
    """What vLLM was started with: at most `max_adapters` in one batch, each of at most `max_rank`. `architecture` is
    what the checkpoint's config.json names ("": the family's own); a model that sees has other names in vLLM."""

    max_adapters: int = 16
    max_rank: int = 64
    architecture: str = ""

    def __post_init__(self) -> None:
        if self.max_rank not in RANKS:
            raise ValueError(f"vLLM has no room for adapters of rank {self.max_rank}; choose one of {RANKS}")


#: An expert's product, in PEFT's layout.
_EXPERT = re.compile(r"\.mlp(\.experts\.\d+\.)(gate_proj|up_proj|down_proj)\b")


def targets(config: DecoderConfig) -> list[str]:
    """The modules that vLLM wraps, by its own names. Without lm_head: with it, prompt logprobs are silently wrong."""
    attention = ["query_key_value", "dense"] if config.fused_qkv else ["qkv_proj", "o_proj"]
    if config.latent:
        attention = ["o_proj", *(["fused_qkv_a_proj"] if config.latent.q_rank else ["q_proj", "kv_a_proj_with_mqa"])]
    dense = ["gate_up_proj", "down_proj"]
    also = config.dense_mlp_layers or config.shared_intermediate_size
    return [*attention, *(["experts"] if config.num_experts else []), *(dense if also else [])]


def convert(name: str, source: Weights | None, target: Path, config: DecoderConfig, limits: LoraLimits) -> int:
    """Write the adapter in `source` to the folder `target`; returns its policy version. Raises AdapterUnusable."""
    try:
        if source is None:
            raise FileNotFoundError(name)
        with reading(source) as folder:
            loaded = load_adapter(folder, config)
    except FileNotFoundError as error:
        raise AdapterUnusable(GONE.format(name=name)) from error
    except (AdapterFileError, Damaged) as error:
        raise AdapterUnusable(f"the sampler weights {name!r} are damaged or of another base model") from error
    adapter = loaded.adapter
    reason = not_servable(adapter, limits)
    if reason is not None:
        raise NotServable(f"the sampler weights {name!r} cannot be served by vLLM: {reason}")
    fresh = target.with_name(f"{target.name}.new")
    # The scale goes into the weights: vLLM reads alpha as a whole number.
    tensors = {key: (view * adapter.scale if key.endswith("_B") else view) for key, view in adapter.views.items()}
    arrays = {key: tensor.numpy() for key, tensor in tensors.items()}
    named = partial(_named, TABLE[config.architecture].layout)
    try:
        write_peft(fresh, arrays, base_model="base", rank=adapter.rank, alpha=adapter.rank, named=named)
        os.replace(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)  # for example on a full disk
    return version_of(loaded.details)


def _named(layout: Layout, key: str) -> str:
    """vLLM's name of a tensor: experts are named as in the family's checkpoints."""
    names = dict(zip(("gate_proj", "up_proj", "down_proj"), layout.expert, strict=True))
    return _EXPERT.sub(lambda found: f".{layout.mixture}{found[1]}{names[found[2]]}", key)


def other_rotation(config: DecoderConfig) -> str | None:
    """Why vLLM's latent attention would give other numbers, with or without an adapter; None if it would not."""
    if config.latent is not None and not config.latent.interleaved:
        return "rope_interleave is false in the model's config.json, which vLLM does not heed"
    if config.latent is not None and config.rope.kind != "yarn":
        return "latent attention holds in vLLM with YaRN alone, which the model's config.json does not have"
    return None


def not_servable(adapter: Adapter, limits: LoraLimits) -> str | None:
    """Why vLLM cannot serve an adapter, or None."""
    architecture = limits.architecture or adapter.shape.config.architecture
    if architecture not in FAMILIES:
        return f"they are of a {architecture}; it was tried with adapters of {', '.join(FAMILIES)}"
    if reason := other_rotation(adapter.shape.config):
        return reason
    if adapter.shape.train_unembed:
        return "they train the unembedding (make the run with train_unembed=False)"
    if adapter.rank > limits.max_rank:
        most = limits.max_rank
        return f"their rank is {adapter.rank}, and it was started for at most {most} ([generator.vllm] max_rank)"
    if not bool(adapter.flat.isfinite().all()):
        return "their numbers are not finite"
    return None
