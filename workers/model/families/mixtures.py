"""Families with mixtures of experts."""

from __future__ import annotations

from typing import Any

from workers.model.config import DecoderConfig, GateConfig, RouterConfig
from workers.model.families.dense import decoder, full_attention, no_biases, window_everywhere, windows_of
from workers.model.families.fields import Fields
from workers.model.families.rope import read_rope


def experts(fields: Fields, *names: str, width: str) -> dict[str, Any]:
    """The number of experts under any of `names`, how many a token has, and their width."""
    name = next((name for name in names if fields.get(name) is not None), names[0])
    found, per_token, size = fields.need(name), fields.need("num_experts_per_tok"), fields.need(width)
    for other in names:
        fields.only(other, found)
    if per_token > found:
        problem = f"{name}={found}, num_experts_per_tok={per_token}"
        fields.refuse(problem, "no more experts per token than experts")
    return {"num_experts": found, "experts_per_token": per_token, "moe_intermediate_size": size}


def qwen3_moe(fields: Fields) -> DecoderConfig:
    no_biases(fields)
    only, step = fields.several("mlp_only_layers"), fields.whole("decoder_sparse_step", 1)
    layers = range(fields.need("num_hidden_layers"))
    return decoder(
        "Qwen3MoeForCausalLM",
        fields,
        norm_topk=fields.flag("norm_topk_prob"),
        dense_layers=tuple(i for i in layers if i in only or (i + 1) % step),
        # transformers 5 writes the number of experts as num_local_experts, earlier versions as num_experts.
        **experts(fields, "num_experts", "num_local_experts", width="moe_intermediate_size"),
        **window_everywhere(fields, switch="use_sliding_window"),
    )


def mixtral(fields: Fields) -> DecoderConfig:
    return decoder(
        "MixtralForCausalLM",
        fields,
        eps=1e-5,
        rope=read_rope(fields, theta=1e6),
        qk_norm="",
        norm_topk=True,
        **experts(fields, "num_local_experts", "num_experts", width="intermediate_size"),
        **window_everywhere(fields),
    )


def olmoe(fields: Fields) -> DecoderConfig:
    no_biases(fields)
    full_attention(fields)
    fields.unset("clip_qkv", "queries, keys and values that are not clipped")
    return decoder(
        "OlmoeForCausalLM",
        fields,
        eps=1e-5,
        qk_norm="whole",
        norm_topk=fields.flag("norm_topk_prob"),
        **experts(fields, "num_experts", "num_local_experts", width="intermediate_size"),
    )


def sigmoid_groups(
    fields: Fields, *, routed: str = "n_routed_experts", shared: str = "n_shared_experts"
) -> dict[str, Any]:
    """What DeepSeek-V3 and those after it share: sigmoid scores with a correction, chosen by group, scaled (by numbers
    for which every family has another default: they must be there); experts of every token; the first layers dense;
    layers for predicting several tokens, which are not used."""
    chosen = experts(fields, routed, "num_local_experts", width="moe_intermediate_size")
    groups, best = fields.need("n_group"), fields.need("topk_group")
    each = chosen["num_experts"] // groups
    if chosen["num_experts"] % groups or best > groups or (groups > 1 and each < 2):
        problem = f"n_group={groups}, topk_group={best}, {routed}={chosen['num_experts']}"
        fields.refuse(problem, "groups of equal size, two experts or more in each")
    if best * each < chosen["experts_per_token"]:
        problem = f"num_experts_per_tok={chosen['experts_per_token']}, n_group={groups}, topk_group={best}"
        fields.refuse(problem, f"at most the {best * each} experts of so many groups")
    dense = fields.count("first_k_dense_replace", 0)
    return {
        **chosen,
        "router": RouterConfig("sigmoid", True, groups, best, fields.number("routed_scaling_factor", None)),
        "norm_topk": fields.flag("norm_topk_prob", True),
        "shared_intermediate_size": fields.count(shared, 0) * chosen["moe_intermediate_size"],
        "dense_layers": tuple(range(min(dense, fields.need("num_hidden_layers")))) if dense else (),
        "prediction_layers": fields.count("num_nextn_predict_layers", 0),
    }


def glm4_moe(fields: Fields) -> DecoderConfig:
    return decoder(
        "Glm4MoeForCausalLM",
        fields,
        eps=1e-5,
        rope=read_rope(fields, partial=0.5),
        qk_norm="head" if fields.flag("use_qk_norm") else "",
        qkv_bias=fields.flag("attention_bias"),
        **sigmoid_groups(fields),
    )


def bailing_moe_v2(fields: Fields) -> DecoderConfig:
    """The model's own code ignores some fields of the config. Such a field is refused unless it says what the code
    does."""
    head_dim = fields.need("head_dim")
    turned = fields.whole("rotary_dim", head_dim)
    rope = read_rope(fields, partial=turned / head_dim)
    if fields.get("rotary_dim", int(head_dim * rope.partial)) != int(head_dim * rope.partial):
        problem = f"rotary_dim={turned}, head_dim={head_dim}, partial_rotary_factor={rope.partial:g}"
        fields.refuse(problem, f"rotary_dim={int(head_dim * rope.partial)}")
    for name in ("use_qk_norm", "use_rmsnorm", "moe_router_enable_expert_bias", "norm_topk_prob"):
        fields.only(name, True)
    for name in ("use_bias", "use_qkv_bias", "norm_head", "norm_softmax", "use_sliding_window"):
        fields.unset(name, "Ling 2's layers, as published")
    fields.only("score_function", "sigmoid")
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    fields.only("router_dtype", "fp32")
    width, shared = fields.need("moe_intermediate_size"), "moe_shared_expert_intermediate_size"
    fields.same("moe_intermediate_size", width, shared, fields.whole(shared, width))
    for name in ("sliding_window", "max_window_layers", "mtp_loss_scaling_factor"):
        fields.get(name)
    for name in ("n_group", "topk_group"):
        fields.need(name)
    return decoder(
        "BailingMoeV2ForCausalLM",
        fields,
        rope=rope,
        fused_qkv=True,
        **sigmoid_groups(fields, routed="num_experts", shared="num_shared_experts"),
    )


def gpt_oss(fields: Fields) -> DecoderConfig:
    biases, layers = fields.flag("attention_bias", True), fields.need("num_hidden_layers")
    if not fields.object("rope_scaling") and not fields.object("rope_parameters"):
        fields.refuse(
            "no rope_scaling and no rope_parameters",
            "rope_scaling or rope_parameters in the config.json of this family",
        )
    chosen = fields.need("num_experts_per_tok")
    other = fields.whole("experts_per_token", chosen)
    fields.same("num_experts_per_tok", chosen, "experts_per_token", other)
    alternate = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    return decoder(
        "GptOssForCausalLM",
        fields,
        eps=1e-5,
        head_dim=64,
        rope=read_rope(fields, theta=150000.0),
        qk_norm="",
        qkv_bias=biases,
        o_bias=biases,
        sinks=True,
        norm_topk=False,  # the softmax of the chosen is that
        router=RouterConfig("chosen", bias=True),
        gate=GateConfig(fields.number("swiglu_limit", 7.0), fields.number("swiglu_alpha", 1.702)),
        expert_bias=True,
        **experts(fields, "num_local_experts", "num_experts", width="intermediate_size"),
        **windows_of(fields, fields.several("layer_types", alternate)),
    )
