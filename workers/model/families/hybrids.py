"""Families in which most layers have a recurrence instead of attention: a gated delta rule, or Mamba-2."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from workers.model.config import DecoderConfig, DeltaConfig, GateConfig, MambaConfig, RopeConfig
from workers.model.families.dense import decoder, no_biases
from workers.model.families.fields import Fields
from workers.model.families.mixtures import experts, sigmoid_groups
from workers.model.families.rope import read_rope


def delta_and_gates(fields: Fields, *, grouped: bool) -> dict[str, Any]:
    """The kinds of these families' layers: linear_attention in those that `layer_types` names, or else in all but every
    fourth; the others have attention with an output gate."""
    no_biases(fields)
    fields.unset("use_sliding_window", "no sliding window in this family")
    fields.get("max_window_layers")
    layers, every = fields.need("num_hidden_layers"), fields.whole("full_attention_interval", 4)
    usual = ["full_attention" if (layer + 1) % every == 0 else "linear_attention" for layer in range(layers)]
    kinds = fields.several("layer_types", usual)
    other = sorted({str(kind) for kind in kinds} - {"full_attention", "linear_attention"})
    if other or len(kinds) != layers:
        problem = f"num_hidden_layers={layers}, layer_types={kinds!r}"
        fields.refuse(problem, "full_attention or linear_attention for each layer")
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
    for kind in ("linear_attention", "full_attention"):
        if kind not in kinds:
            problem = f"num_hidden_layers={layers}, full_attention_interval={every}, layer_types without {kind!r}"
            fields.refuse(problem, "linear_attention and full_attention in some layers each")
    return {"head_dim": 256, "rope": read_rope(fields, partial=0.25), "output_gate": True, "delta": delta}


def shared_expert(fields: Fields) -> dict[str, Any]:
    """Experts chosen by a router, and a shared expert with a gate, which every token passes through."""
    return {
        **experts(fields, "num_experts", "num_local_experts", width="moe_intermediate_size"),
        "shared_intermediate_size": fields.need("shared_expert_intermediate_size"),
        "shared_gate": True,
    }


def qwen3_next(fields: Fields) -> DecoderConfig:
    only, step = fields.several("mlp_only_layers"), fields.whole("decoder_sparse_step", 1)
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
    """Other fields of these families' configs, marked as read."""
    fields.only("attn_output_gate", True)
    fields.only("mamba_ssm_dtype", "float32")
    fields.only("norm_topk_prob", True)
    fields.unset("mlp_only_layers", "the same MLP in every layer")
    for prediction in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"):
        fields.get(prediction)  # about layers that are not loaded


#: The kinds of Nemotron's layers, by their letters in `hybrid_override_pattern`, and by their names in
#: `layers_block_type`.
_MAMBA, _ATTENTION, _MLP, _EXPERTS = "M*-E"
_BLOCKS = {
    **dict.fromkeys(("mamba", "linear_attention"), _MAMBA),
    **dict.fromkeys(("attention", "full_attention"), _ATTENTION),
    "mlp": _MLP,
    "moe": _EXPERTS,
}
#: Fields about initial values, libraries, rounding, and layers that are not loaded; and those that its attention, which
#: has no rotary embedding, does not use.
_UNUSED = """
time_step_min time_step_max time_step_floor rescale_prenorm_residual expand
num_logits_to_keep use_mamba_kernels mamba_ssm_cache_dtype chunk_size residual_in_fp32 moe_shared_expert_overlap
mtp_layers_block_type mtp_hybrid_override_pattern num_nextn_predict_layers keep_mtp_spec_in_bf16
rope_theta rope_scaling rope_parameters partial_rotary_factor
"""
#: Fields that have no effect if no layer has experts.
_OF_EXPERTS = """
n_routed_experts num_experts_per_tok moe_intermediate_size moe_shared_expert_intermediate_size moe_latent_size n_group
topk_group norm_topk_prob routed_scaling_factor n_shared_experts
"""


def nemotron_h(fields: Fields) -> DecoderConfig:
    """Every layer is one thing. Its code ignores some fields that its config has; such a one must say what it does."""
    layers = _pattern(fields)
    for name in _UNUSED.split():
        fields.get(name)
    for name in ("use_bias", "mlp_bias", "attention_bias", "mamba_proj_bias"):
        fields.unset(name, "projections without bias")
    fields.unset("sliding_window", "no sliding window in this family")
    fields.only("use_conv_bias", True)
    fields.only("mamba_hidden_act", "silu")
    fields.only("mlp_hidden_act", "relu2")
    _no_limit(fields)
    eps = fields.number("layer_norm_epsilon", 1e-5)
    for name in ("norm_eps", "rms_norm_eps"):
        fields.same("layer_norm_epsilon", eps, name, fields.number(name, eps))
    parts: dict[str, Any] = {}
    if _EXPERTS in layers:
        parts = _nemotron_experts(fields)
    for name in _OF_EXPERTS.split():
        fields.get(name)
    config = decoder(
        "NemotronHForCausalLM",
        fields,
        act="relu2",
        num_layers=len(layers),
        head_dim=fields.whole("attention_head_dim", 128),
        rope=RopeConfig(partial=0.0),
        qk_norm="",
        gate=GateConfig(gated=False),
        mamba=_mamba(fields, _at(layers, _MAMBA)),
        **parts,
    )
    return replace(config, norm_eps=eps, mlp_layers=_at(layers, _MLP, _EXPERTS), dense_layers=_at(layers, _MLP))


def _at(layers: str, *kinds: str) -> tuple[int, ...]:
    return tuple(layer for layer, kind in enumerate(layers) if kind in kinds)


def _pattern(fields: Fields) -> str:
    """A letter for each layer."""
    letters = fields.get("hybrid_override_pattern")
    blocks = fields.get("layers_block_type") or fields.get("layer_types")
    fields.get("layer_types")
    if letters is None:
        if not isinstance(blocks, list) or any(not isinstance(b, str) or b not in _BLOCKS for b in blocks):
            fields.refuse(
                f"no hybrid_override_pattern, layers_block_type={blocks!r}", f"{', '.join(_BLOCKS)} for each layer"
            )
        letters = "".join(_BLOCKS[block] for block in blocks)
    if not isinstance(letters, str):
        fields.refuse(f"hybrid_override_pattern={letters!r}", "M, *, - or E for each layer")
    unknown = sorted(set(letters) - {_MAMBA, _ATTENTION, _MLP, _EXPERTS})
    if unknown:
        fields.refuse(f"hybrid_override_pattern with {unknown[0]!r}", "M, *, - or E for each layer")
    for kind in (_MAMBA, _ATTENTION):
        if kind not in letters:
            fields.refuse(
                f"hybrid_override_pattern={letters!r} without {kind!r}", "layers of M and of * in this family"
            )
    if not set(letters) & {_MLP, _EXPERTS}:
        fields.refuse(f"hybrid_override_pattern={letters!r}", "some layers of - or E")
    if fields.whole("num_hidden_layers", len(letters)) != len(letters):
        problem = f"num_hidden_layers={fields.get('num_hidden_layers')}, hybrid_override_pattern={letters!r}"
        fields.refuse(problem, f"{len(letters)} layers")
    return letters


def _no_limit(fields: Fields) -> None:
    """`time_step_limit` must be from 0 up; infinity is written in two ways."""
    limit = fields.get("time_step_limit", [0.0, math.inf])
    if limit not in ([0.0, math.inf], [0.0, {"__float__": "Infinity"}]):
        fields.refuse(f"time_step_limit={limit!r}", "steps without a limit, [0.0, Infinity]")


def _mamba(fields: Fields, layers: tuple[int, ...]) -> MambaConfig:
    mamba = MambaConfig(
        layers,
        fields.whole("mamba_num_heads", 128),
        fields.whole("mamba_head_dim", 64),
        fields.whole("n_groups", 8),
        fields.whole("ssm_state_size", 128),
        fields.whole("conv_kernel", 4),
    )
    if mamba.heads % mamba.groups or mamba.taps < 2:
        problem = f"mamba_num_heads={mamba.heads}, n_groups={mamba.groups}, conv_kernel={mamba.taps}"
        fields.refuse(problem, "groups of equal size, and a convolution of two positions or more")
    return mamba


def _nemotron_experts(fields: Fields) -> dict[str, Any]:
    fields.only("n_shared_experts", 1)
    latent = fields.need("moe_latent_size") if fields.get("moe_latent_size") is not None else 0
    shared = fields.need("moe_shared_expert_intermediate_size")
    own = {"shared_intermediate_size": shared, "expert_latent": latent, "prediction_layers": 0}
    return {**sigmoid_groups(fields), **own}
