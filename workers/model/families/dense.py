"""Families whose layers are all dense, and what their readers share with those of mixtures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workers.model.config import DecoderConfig
from workers.model.families.fields import Fields
from workers.model.families.rope import read_rope


def decoder(architecture: str, fields: Fields, **parts: Any) -> DecoderConfig:
    """The config of a decoder, from the fields that every family has. `parts` are the family's own, and take
    precedence."""
    heads, hidden = fields.need("num_attention_heads"), fields.need("hidden_size")
    kv_heads = fields.whole("num_key_value_heads", heads)
    if heads % kv_heads:
        problem = f"{heads} heads over {kv_heads} key-value heads"
        fields.refuse(f"{problem} (num_attention_heads, num_key_value_heads)", "a whole number of groups")
    if heads > hidden:
        fields.refuse(f"num_attention_heads={heads}, hidden_size={hidden}", "no more heads than numbers")
    fields.only("hidden_act", parts.pop("act", "silu"))
    common: dict[str, Any] = {
        "vocab_size": fields.need("vocab_size"),
        "hidden_size": hidden,
        "num_layers": parts.pop("num_layers", None) or fields.need("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": fields.whole("head_dim", parts.pop("head_dim", hidden // heads)),
        "intermediate_size": parts.pop("intermediate_size", None) or fields.need("intermediate_size"),
        "context_length": fields.need("max_position_embeddings"),
        "norm_eps": fields.number("rms_norm_eps", parts.pop("eps", 1e-6)),
        "tie_embeddings": fields.flag("tie_word_embeddings"),
    }
    if "rope" not in parts:
        common["rope"] = read_rope(fields)
    config = DecoderConfig(architecture, **{**common, **parts})
    width = config.latent.rope_dim if config.latent else config.head_dim
    turned = int(width * config.rope.partial)
    if turned % 2 or not 0 <= turned <= width:
        of = "qk_rope_head_dim" if config.latent else "head_dim"
        share = f"{of}={width}, partial_rotary_factor={config.rope.partial:g}"
        fields.refuse(f"{share}: {turned} of {width} numbers turn", "an even number that turns, no more than all")
    return config


def no_biases(fields: Fields) -> None:
    fields.unset("attention_bias", "projections without bias in this family")
    fields.unset("mlp_bias", "projections without bias")


def full_attention(fields: Fields) -> None:
    """Refuse layers that are not of full attention."""
    kinds = fields.several("layer_types")
    other = sorted({str(kind) for kind in kinds} - {"full_attention"})
    if other:
        fields.refuse(f"layer_types with {other[0]!r}", "full_attention in every layer of this family")


def window_everywhere(fields: Fields, *, switch: str = "") -> dict[str, Any]:
    """A sliding window in every layer; with a `switch`, only where that field is true."""
    on = fields.flag(switch) if switch else True
    window = fields.get("sliding_window")
    full_attention(fields)
    fields.get("max_window_layers")
    if not on or window is None:
        return {}
    layers = tuple(range(fields.need("num_hidden_layers")))
    return {"window": fields.need("sliding_window"), "window_layers": layers}


def window_by_layer(fields: Fields) -> dict[str, Any]:
    """A sliding window in the layers that `layer_types` names, or else in those from `max_window_layers` on."""
    on, first = fields.flag("use_sliding_window"), fields.count("max_window_layers", 28)
    window = fields.get("sliding_window")
    on = on and window is not None
    late = [
        "sliding_attention" if on and layer >= first else "full_attention"
        for layer in range(fields.need("num_hidden_layers"))
    ]
    kinds = fields.several("layer_types") or late
    if "sliding_attention" in kinds and not on:
        problem = f"layer_types with 'sliding_attention', use_sliding_window={on}, sliding_window={window}"
        fields.refuse(problem, "use_sliding_window=true and a window")
    return windows_of(fields, kinds)


def windows_of(fields: Fields, kinds: Sequence[str]) -> dict[str, Any]:
    """A sliding window in the layers of that kind."""
    layers = fields.need("num_hidden_layers")
    other = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
    if other or len(kinds) != layers:
        problem = f"num_hidden_layers={layers}, layer_types={kinds!r}"
        fields.refuse(problem, "full_attention or sliding_attention for each layer")
    windowed = tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    return {"window": fields.need("sliding_window"), "window_layers": windowed} if windowed else {}


def llama(fields: Fields) -> DecoderConfig:
    no_biases(fields)
    full_attention(fields)
    return decoder("LlamaForCausalLM", fields, qk_norm="")


def mistral(fields: Fields) -> DecoderConfig:
    return decoder("MistralForCausalLM", fields, qk_norm="", **window_everywhere(fields))


def qwen2(fields: Fields) -> DecoderConfig:
    return decoder("Qwen2ForCausalLM", fields, qk_norm="", qkv_bias=True, **window_by_layer(fields))


def qwen3(fields: Fields) -> DecoderConfig:
    no_biases(fields)
    return decoder("Qwen3ForCausalLM", fields, head_dim=128, **window_by_layer(fields))
