"""Families in which most layers have a gated delta rule instead of attention."""

from __future__ import annotations

from typing import Any

from workers.model.config import DecoderConfig, DeltaConfig
from workers.model.families.dense import decoder, no_biases
from workers.model.families.fields import Fields
from workers.model.families.mixtures import experts
from workers.model.families.rope import read_rope


def delta_and_gates(fields: Fields, *, grouped: bool) -> dict[str, Any]:
    """What the layers of these families are: linear_attention in those that `layer_types` names, or else in all but
    every fourth; the others have attention with an output gate."""
    no_biases(fields)
    fields.unset("use_sliding_window", "no sliding window in this family")
    fields.get("max_window_layers")
    layers, every = fields.need("num_hidden_layers"), fields.whole("full_attention_interval", 4)
    usual = ["full_attention" if (layer + 1) % every == 0 else "linear_attention" for layer in range(layers)]
    kinds = fields.get("layer_types", usual)
    other = sorted({str(kind) for kind in kinds} - {"full_attention", "linear_attention"})
    if other or len(kinds) != layers:
        fields.refuse(f"layer_types={kinds!r}", f"full_attention or linear_attention for each of {layers} layers")
    delta = DeltaConfig(
        tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention"),
        fields.whole("linear_num_key_heads", 16),
        fields.whole("linear_num_value_heads", 32),
        fields.whole("linear_key_head_dim", 128),
        fields.whole("linear_value_head_dim", 128),
        fields.whole("linear_conv_kernel_dim", 4),
        grouped,
    )
    if delta.value_heads % delta.key_heads or delta.taps < 2:
        problem = f"linear_num_value_heads={delta.value_heads}, linear_num_key_heads={delta.key_heads}"
        fields.refuse(
            f"{problem}, linear_conv_kernel_dim={delta.taps}",
            "a whole number of value heads for each key head, and a convolution of two positions or more",
        )
    if not delta.layers:
        fields.refuse("layer_types without 'linear_attention'", "linear_attention in some layers of this family")
    return {"head_dim": 256, "rope": read_rope(fields, partial=0.25), "output_gate": True, "delta": delta}


def shared_expert(fields: Fields) -> dict[str, Any]:
    """Experts, and one with a gate that every token has."""
    return {
        **experts(fields, "num_experts", "num_local_experts", width="moe_intermediate_size"),
        "shared_intermediate_size": fields.need("shared_expert_intermediate_size"),
        "shared_gate": True,
    }


def qwen3_next(fields: Fields) -> DecoderConfig:
    only, step = fields.get("mlp_only_layers", []), fields.whole("decoder_sparse_step", 1)
    layers = range(fields.need("num_hidden_layers"))
    return decoder(
        "Qwen3NextForCausalLM",
        fields,
        norm_topk=fields.flag("norm_topk_prob", True),
        dense_layers=tuple(i for i in layers if i in only or (i + 1) % step),
        **shared_expert(fields),
        **delta_and_gates(fields, grouped=True),
    )


def qwen3_5(fields: Fields) -> DecoderConfig:
    _known(fields)
    return decoder("Qwen3_5ForCausalLM", fields, **delta_and_gates(fields, grouped=False))


def qwen3_5_moe(fields: Fields) -> DecoderConfig:
    _known(fields)
    mixture = shared_expert(fields)
    return decoder(
        "Qwen3_5MoeForCausalLM",
        fields,
        intermediate_size=fields.whole("intermediate_size", mixture["moe_intermediate_size"]),  # no layer is dense
        norm_topk=True,
        **mixture,
        **delta_and_gates(fields, grouped=False),
    )


def _known(fields: Fields) -> None:
    """What their configs say besides."""
    fields.only("attn_output_gate", True)
    fields.only("mamba_ssm_dtype", "float32")
    fields.only("norm_topk_prob", True)
    fields.unset("mlp_only_layers", "the same MLP in every layer")
    for prediction in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"):
        fields.get(prediction)  # of layers that are not loaded
