"""The numbers that define a decoder, read from a model folder's config.json without torch or transformers.

The API process (which must stay free of torch) and the workers read the same file through the same code, so they can
never disagree about what a model is. Anything the decoder cannot compute exactly is refused here, by name.
Reads both layouts of config.json: `rope_parameters` (transformers 5) and `rope_theta` + `rope_scaling` (before).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "LlamaForCausalLM")
ROPE_TYPES = ("default", "llama3")


class UnsupportedModel(ValueError):
    """A model folder that this decoder cannot serve; the message names model, path, feature and the way out."""

    def __init__(self, name: str, path: Path, problem: str, supported: str) -> None:
        super().__init__(f"model {name!r} at {path}: {problem}; supported: {supported}")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. `factor` is None for the default kind; with a factor the four numbers are those of
    Llama 3.1, which stretches only the long wavelengths."""

    theta: float = 10000.0
    factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192


@dataclass(frozen=True)
class DecoderConfig:
    """The whole shape of a decoder. `num_experts` 0 means every layer is dense; in a mixture-of-experts model
    `dense_layers` names the layers that are dense all the same. `intermediate_size` is the width of a dense MLP,
    `moe_intermediate_size` that of one expert."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    context_length: int
    norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tie_embeddings: bool = False
    qk_norm: bool = True
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk: bool = False
    dense_layers: tuple[int, ...] = ()

    @property
    def mixture_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_layers) if self.is_moe(layer))

    def is_moe(self, layer: int) -> bool:
        """Whether this layer's MLP is a mixture of experts."""
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def active_parameters(self) -> int:
        """Of the matrices that one token is multiplied with: attention, the chosen experts or the MLP, the head."""
        dense = self.num_layers - len(self.mixture_layers)
        experts = len(self.mixture_layers) * self.experts_per_token * self.moe_intermediate_size
        attention = self.num_layers * 2 * (self.q_size + self.kv_size)
        mlp = 3 * (dense * self.intermediate_size + experts)
        router = len(self.mixture_layers) * self.num_experts
        return self.hidden_size * (attention + mlp + router + self.vocab_size)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; {} when there is no such file."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(data).__name__}")
    return data


def read_config(name: str, path: Path) -> DecoderConfig:
    """The decoder's numbers from `path/config.json`. Raises UnsupportedModel for anything else."""
    raw = read_json(path / "config.json")
    if not raw:
        raise UnsupportedModel(name, path, "no config.json in the folder", "a local Hugging Face model folder")
    architecture = _architecture(name, path, raw)
    _refuse_features(name, path, raw)

    def need(key: str) -> int:
        value = raw.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise UnsupportedModel(name, path, f"config.json has {key}={value!r}", "a positive integer there")
        return value

    heads, layers, hidden = need("num_attention_heads"), need("num_hidden_layers"), need("hidden_size")
    fallback_head_dim = 128 if architecture == "Qwen3ForCausalLM" else hidden // heads
    kv_heads = raw.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise UnsupportedModel(name, path, f"{heads} heads over {kv_heads} key-value heads", "a whole number of groups")
    return DecoderConfig(
        architecture=architecture,
        vocab_size=need("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=raw.get("head_dim") or fallback_head_dim,
        intermediate_size=need("intermediate_size"),
        context_length=need("max_position_embeddings"),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(name, path, raw),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qk_norm=architecture != "LlamaForCausalLM",
        **(_experts(name, path, raw, layers) if architecture == "Qwen3MoeForCausalLM" else {}),
    )


def _architecture(name: str, path: Path, raw: Mapping[str, Any]) -> str:
    found = raw.get("architectures") or []
    if len(found) != 1 or found[0] not in ARCHITECTURES:
        raise UnsupportedModel(name, path, f"architectures={found!r}", ", ".join(ARCHITECTURES))
    return str(found[0])


def _refuse_features(name: str, path: Path, raw: Mapping[str, Any]) -> None:
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModel(name, path, f"quantization_config ({method})", "float32, bfloat16 and float16 weights")
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(name, path, f"hidden_act={raw['hidden_act']!r}", "silu")
    windowed = "sliding_attention" in (raw.get("layer_types") or [])
    if windowed or (raw.get("use_sliding_window") and raw.get("sliding_window")):
        raise UnsupportedModel(name, path, "sliding window attention", "full attention (use_sliding_window=false)")
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key):
            raise UnsupportedModel(name, path, f"{key}=true", "projections without bias")


def _rope(name: str, path: Path, raw: Mapping[str, Any]) -> RopeConfig:
    new = raw.get("rope_parameters") or {}
    old = raw.get("rope_scaling") or {}
    numbers = {**old, **new}
    kind = numbers.get("rope_type") or numbers.get("type") or "default"
    theta = float(numbers.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    partial = float(numbers.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0)
    if kind not in ROPE_TYPES or partial != 1.0:
        problem = f"rope_type={kind!r}" if partial == 1.0 else f"partial_rotary_factor={partial}"
        raise UnsupportedModel(name, path, problem, "rope_type default or llama3 over the whole head")
    if kind == "default":
        return RopeConfig(theta=theta)
    missing = [k for k in ("factor", "low_freq_factor", "high_freq_factor") if k not in numbers]
    if missing:
        raise UnsupportedModel(name, path, f"llama3 rope without {', '.join(missing)}", "all llama3 rope numbers")
    return RopeConfig(
        theta=theta,
        factor=float(numbers["factor"]),
        low_freq_factor=float(numbers["low_freq_factor"]),
        high_freq_factor=float(numbers["high_freq_factor"]),
        original_context_length=int(numbers.get("original_max_position_embeddings") or raw["max_position_embeddings"]),
    )


def _experts(name: str, path: Path, raw: Mapping[str, Any], layers: int) -> dict[str, Any]:
    # transformers 5 writes the number of experts as num_local_experts, earlier versions as num_experts.
    experts = raw.get("num_experts") or raw.get("num_local_experts")
    per_token, width = raw.get("num_experts_per_tok"), raw.get("moe_intermediate_size")
    if not experts or not per_token or not width or per_token > experts:
        problem = f"num_experts={experts!r}, num_experts_per_tok={per_token!r}, moe_intermediate_size={width!r}"
        raise UnsupportedModel(name, path, problem, "three positive integers, no more experts per token than experts")
    only, step = raw.get("mlp_only_layers") or [], raw.get("decoder_sparse_step") or 1
    return {
        "num_experts": experts,
        "experts_per_token": per_token,
        "moe_intermediate_size": width,
        "norm_topk": bool(raw.get("norm_topk_prob", False)),
        "dense_layers": tuple(i for i in range(layers) if i in only or (i + 1) % step),
    }
