"""Families with latent attention: DeepSeek-V3 and those with its architecture, GLM-4.7-Flash."""

from __future__ import annotations

from dataclasses import replace

from workers.model.config import DecoderConfig, LatentConfig
from workers.model.families.dense import decoder
from workers.model.families.fields import Fields
from workers.model.families.mixtures import sigmoid_groups
from workers.model.families.rope import score_scale


def deepseek_v3(fields: Fields) -> DecoderConfig:
    fields.only("moe_layer_freq", 1)
    return _latent("DeepseekV3ForCausalLM", fields)


def glm4_moe_lite(fields: Fields) -> DecoderConfig:
    layers, dense = fields.need("num_hidden_layers"), fields.count("first_k_dense_replace", 1)
    kinds = fields.several("mlp_layer_types") or ["dense"] * min(dense, layers) + ["sparse"] * (layers - dense)
    if len(kinds) != layers or any(kind not in ("dense", "sparse") for kind in kinds):
        problem = f"num_hidden_layers={layers}, first_k_dense_replace={dense}, mlp_layer_types={kinds!r}"
        fields.refuse(problem, "dense or sparse for each layer")
    config = _latent("Glm4MoeLiteForCausalLM", fields, eps=1e-5)
    return replace(config, dense_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == "dense"))


def _latent(architecture: str, fields: Fields, *, eps: float = 1e-6) -> DecoderConfig:
    plain, turning = fields.need("qk_nope_head_dim"), fields.need("qk_rope_head_dim")
    heads, together = fields.need("num_attention_heads"), plain + turning
    if fields.whole("num_key_value_heads", heads) != heads:
        problem = f"num_key_value_heads={fields.get('num_key_value_heads')}, num_attention_heads={heads}"
        fields.refuse(problem, "as many of both")
    if (fields.get("qk_head_dim", together), fields.get("head_dim", turning)) != (together, turning):
        problem = f"qk_head_dim={fields.get('qk_head_dim')!r}, head_dim={fields.get('head_dim')!r}"
        fields.refuse(
            f"{problem}, qk_nope_head_dim={plain}, qk_rope_head_dim={turning}",
            f"qk_head_dim={together}, head_dim={turning}",
        )
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    fields.unset("attention_bias", "projections without bias in this family")
    latent = LatentConfig(
        q_rank=fields.need("q_lora_rank") if fields.get("q_lora_rank") is not None else 0,
        kv_rank=fields.need("kv_lora_rank"),
        plain_dim=plain,
        rope_dim=turning,
        value_dim=fields.need("v_head_dim"),
        scale=together**-0.5 * score_scale(fields),
        interleaved=fields.flag("rope_interleave", True),
    )
    config = decoder(architecture, fields, eps=eps, qk_norm="", latent=latent, **sigmoid_groups(fields))
    return replace(config, head_dim=together)
