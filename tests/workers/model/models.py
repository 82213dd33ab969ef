"""Tiny random models of every family, made by transformers itself, and the same weights in our decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.workers.model.bailing import BailingConfig, BailingMoeV2ForCausalLM
from workers.model.adapters.adapter import Adapter
from workers.model.adapters.shape import AdapterShape
from workers.model.base.weights import load_decoder
from workers.model.decoder import Decoder

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ROPE: dict[str, Any] = {"rope_theta": 10000.0}
YARN = {**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0}
#: As many experts as fill a vector, so that a sigmoid over them rounds the same on any processor.
GROUPS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 32,
    "num_experts_per_tok": 5,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 2.5,
}
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
#: Every width differs from the others, and values are once wider than keys.
LATENT: dict[str, Any] = {
    **GROUPS,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "head_dim": 8,
}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "qwen3-tied": (Qwen3ForCausalLM, Qwen3Config, {"tie_word_embeddings": True}),
    "moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {**EXPERTS, "norm_topk_prob": True}),
    "moe-mixed": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {**EXPERTS, "num_hidden_layers": 3, "mlp_only_layers": [0], "norm_topk_prob": False},
    ),
    "moe-wide": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "hidden_size": 256, "head_dim": 64},
    ),
    "llama": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "llama-tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama-linear": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 4.0}},
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-yarn": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"rope_parameters": YARN, "use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    ),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 12}),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig, {"num_experts": 8, "num_experts_per_tok": 6, "head_dim": 16}),
    "glm4-moe": (Glm4MoeForCausalLM, Glm4MoeConfig, {**GROUPS, "attention_bias": True, "use_qk_norm": True}),
    "deepseek": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {**LATENT, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}},
    ),
    "deepseek-plain": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {**LATENT, "q_lora_rank": None, "v_head_dim": 32, "rope_interleave": False, "n_group": 1, "topk_group": 1},
    ),
    "glm4-moe-lite": (
        Glm4MoeLiteForCausalLM,
        Glm4MoeLiteConfig,
        {key: value for key, value in LATENT.items() if key != "first_k_dense_replace"},
    ),
    "bailing": (
        BailingMoeV2ForCausalLM,
        BailingConfig,
        {
            **{key: value for key, value in GROUPS.items() if not key.endswith("_experts")},
            "num_experts": 32,
            "num_shared_experts": 2,
            "partial_rotary_factor": 0.5,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-6,
            "use_qk_norm": True,
            "norm_topk_prob": True,
            "score_function": "sigmoid",
            "tie_word_embeddings": False,
        },
    ),
    "gpt-oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {
            "num_hidden_layers": 3,
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "intermediate_size": 64,
            "sliding_window": 12,
            # transformers 5.17 has no such field and computes with 7.0.
            "swiglu_limit": 0.5 if hasattr(GptOssConfig, "swiglu_limit") else 7.0,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
}


FAMILIES |= {
    "qwen3-next": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig,
        {**EXPERTS, **HYBRID, "shared_expert_intermediate_size": 48, "mlp_only_layers": [2]},
    ),
    "qwen3.5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, {**HYBRID, "tie_word_embeddings": True}),
    "qwen3.5-moe": (
        Qwen3_5MoeForCausalLM,
        Qwen3_5MoeTextConfig,
        {
            **EXPERTS,
            **HYBRID,
            "num_hidden_layers": 3,
            "layer_types": HYBRID["layer_types"][1:],
            "shared_expert_intermediate_size": 48,
        },
    ),
}


#: One layer of each kind and one more of Mamba-2; every width differs from the others. Steps have no floor
#: (parts/mamba2.py).
NEMOTRON: dict[str, Any] = {
    "hybrid_override_pattern": "ME*-M",
    "num_hidden_layers": 5,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "ssm_state_size": 24,
    "n_groups": 2,
    "n_routed_experts": 32,
    "num_experts_per_tok": 5,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
    "time_step_min": 1e-30,
}
FAMILIES |= {
    "nemotron-h": (NemotronHForCausalLM, NemotronHConfig, NEMOTRON),
    "nemotron-h-latent": (
        NemotronHForCausalLM,
        NemotronHConfig,
        {
            **NEMOTRON,
            "hybrid_override_pattern": "EM*E",
            "num_hidden_layers": 4,
            "moe_latent_size": 40,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}


def reference(family: str, seed: int = 0, **overrides: Any) -> Any:
    """A transformers model with weights large enough for attention and routing to matter."""
    model_class, config_class, extra = FAMILIES[family]
    config = config_class(**{**SIZES, **extra, **overrides})
    torch.manual_seed(seed)
    model = model_class(config).eval()
    for name, weight in model.named_parameters():
        weight.requires_grad_(False)
        if "norm" in name:
            weight.uniform_(0.5, 1.5)
            if hasattr(config, "linear_num_key_heads") and "linear_attn" not in name:  # stored less one
                weight.sub_(1.0)
        elif name.endswith("A_log"):  # from states that last for hundreds of tokens to those that last for one
            weight.uniform_(-4.0, 1.0)
        elif hasattr(config, "mamba_num_heads") and name.endswith((".dt_bias", ".D", "conv1d.bias")):
            weight.uniform_(-1.0, 1.0)
        else:
            torch.nn.init.normal_(weight, std=1.0 / weight.shape[-1] ** 0.5)
    for name, buffer in model.named_buffers():
        if "correction" in name or "expert_bias" in name:
            buffer.uniform_(-0.2, 0.2)
    return model


def ours(model: Any, folder: Path) -> Decoder:
    """Our decoder of the same weights, saved to a folder and loaded."""
    model.save_pretrained(folder)
    return load_decoder(folder)


def random_adapter(decoder: Decoder, rank: int, seed: int, scale: float = 2.0, **targets: bool) -> Adapter:
    """An adapter whose B factors are not zero, so that everything has a gradient."""
    adapter = Adapter.init(AdapterShape(decoder.config, rank, **targets), seed, scale=scale)
    generator = torch.Generator().manual_seed(seed + 1)
    for name, view in adapter.views.items():
        if name.endswith("_B"):
            view.normal_(0.0, 0.1, generator=generator)
    return adapter


def packed(lengths: list[int], vocab_size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and their positions for packed sequences of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab_size, (sum(lengths),), generator=generator)
    return tokens, torch.cat([torch.arange(n) for n in lengths])
