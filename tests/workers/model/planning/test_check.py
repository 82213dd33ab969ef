"""`weftd model check`: what it says about a model folder, against the loaded model; and what it refuses."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from api.cli import weftd
from tests.workers.model.models import FAMILIES, ours, reference
from workers.model.adapters.adapter import Adapter
from workers.model.adapters.shape import AdapterShape
from workers.model.card import ModelCard, read_card
from workers.model.config import UnsupportedModel
from workers.model.families.read import read_config
from workers.model.planning.check import check_model, trained
from workers.model.tiny import TINY_PATH


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_are_those_of_the_loaded_model(family: str, tmp_path: Path) -> None:
    model = reference(family)
    decoder = ours(model, tmp_path)
    found = check_model(ModelCard("m", tmp_path, decoder.config, ()), "float32")
    assert found.parameters == sum(weight.numel() for weight in decoder.parameters())
    assert found.weight_bytes == 4 * found.parameters
    assert found.adapters[8] == Adapter.zeros(AdapterShape(decoder.config, 8)).shape.num_parameters
    names = {name for names in trained(decoder.config).values() for name in names}
    mlp, up = ("mixer", "up_proj") if family.startswith("nemotron") else ("mlp", "gate_proj")
    assert (f"{mlp}.experts.*.{up}" in names) == bool(decoder.config.num_experts)
    assert (f"{mlp}.{up}" in names) == any(name.endswith(f".{mlp}.{up}.weight") for name in model.state_dict())


SAME: dict[str, Any] = {
    "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.55.0", "use_cache": True,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MIXTURE: dict[str, Any] = {"output_router_logits": False, "router_aux_loss_coef": 0.01}
DELTA: dict[str, Any] = {
    "attention_bias": False, "full_attention_interval": 4, "head_dim": 256, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_value_head_dim": 128,
}  # fmt: skip
DELTA_3_5: dict[str, Any] = {
    **{key: value for key, value in SAME.items() if key != "rope_scaling"},
    "attn_output_gate": True, "dtype": "bfloat16", "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
    "mlp_only_layers": [], "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False, "vocab_size": 248320, "eos_token_id": 248044,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
        "rope_theta": 10000000, "rope_type": "default",
    },
}  # fmt: skip
SEEING: dict[str, Any] = {
    "image_token_id": 248056, "video_token_id": 248057, "vision_start_token_id": 248053,
    "vision_end_token_id": 248054, "vision_config": {"depth": 27, "hidden_size": 1152},
}  # fmt: skip
#: Every field of the config.json as published, and the size of the model in billions as its makers give it.
PUBLISHED: dict[str, tuple[float, dict[str, Any]]] = {
    "Qwen2ForCausalLM": (7.62, {
        "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28,
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rope_theta": 1000000.0,
        "sliding_window": 131072, "use_sliding_window": False, "vocab_size": 152064, "use_mrope": False,
    }),
    "MistralForCausalLM": (7.24, {
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rope_theta": 10000.0, "sliding_window": 4096,
        "vocab_size": 32000,
    }),
    "MixtralForCausalLM": (46.7, {
        **MIXTURE, "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32000,
    }),
    "OlmoeForCausalLM": (6.92, {
        **MIXTURE, "attention_bias": False, "clip_qkv": None, "hidden_size": 2048, "intermediate_size": 1024,
        "max_position_embeddings": 4096, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64,
        "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16, "rope_theta": 10000.0,
        "vocab_size": 50304,
    }),
    "Glm4MoeForCausalLM": (106, {
        "attention_bias": True, "head_dim": 128, "hidden_size": 4096, "partial_rotary_factor": 0.5,
        "intermediate_size": 10944, "max_position_embeddings": 131072, "moe_intermediate_size": 1408,
        "norm_topk_prob": True, "num_attention_heads": 96, "n_group": 1, "topk_group": 1, "n_routed_experts": 128,
        "n_shared_experts": 1, "routed_scaling_factor": 1.0, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
        "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "rope_theta": 1000000,
        "use_qk_norm": False, "vocab_size": 151552,
    }),
    "DeepseekV3ForCausalLM": (671, {
        "attention_bias": False, "aux_loss_alpha": 0.001, "ep_size": 1, "first_k_dense_replace": 3,
        "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "pretraining_tp": 1,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
        "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True,
        "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
    }),
    "KimiK25ForConditionalGeneration": (1026, {  # counted from the shapes of its tensors
        "ignore_index": -100, "media_placeholder_token_id": 163605, "model_type": "kimi_k25",
        "use_unified_vision_chunk": True, "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "vision_config": {"mm_projector_type": "patchmerger", "vt_hidden_size": 1152, "vt_num_hidden_layers": 27},
        "text_config": {
            **{key: value for key, value in SAME.items() if key != "rope_scaling"},
            "attention_bias": False, "aux_loss_alpha": 0.001, "ep_size": 1, "first_k_dense_replace": 1,
            "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 262144,
            "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1,
            "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64,
            "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64,
            "num_nextn_predict_layers": 0, "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid",
            "seq_aux": True, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 163840,
            "rope_scaling": {
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096, "type": "yarn",
            },
            "quantization_config": {
                "config_groups": {"group_0": {
                    "input_activations": None, "output_activations": None, "targets": ["Linear"],
                    "weights": {
                        "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
                        "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True,
                        "type": "int",
                    },
                }},
                "format": "pack-quantized", "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
                "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed",
            },
        },
    }),
    "Glm4MoeLiteForCausalLM": (30, {
        "attention_bias": False, "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10240,
        "kv_lora_rank": 512, "max_position_embeddings": 202752, "moe_intermediate_size": 1536, "n_group": 1,
        "n_routed_experts": 64, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 20,
        "num_experts_per_tok": 4, "num_hidden_layers": 47, "num_key_value_heads": 20, "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
        "rope_theta": 1000000, "routed_scaling_factor": 1.8, "topk_group": 1, "topk_method": "noaux_tc",
        "v_head_dim": 256, "vocab_size": 154880,
    }),
    "BailingMoeV2ForCausalLM": (16.3, {
        "embedding_dropout": 0.0, "first_k_dense_replace": 1, "head_dim": 128, "hidden_size": 2048,
        "intermediate_size": 5120, "max_position_embeddings": 32768, "max_window_layers": 20,
        "model_type": "bailing_moe", "moe_intermediate_size": 512, "moe_router_enable_expert_bias": True,
        "moe_shared_expert_intermediate_size": 512, "n_group": 8, "norm_head": False, "norm_softmax": False,
        "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8,
        "num_hidden_layers": 20, "num_key_value_heads": 4, "num_nextn_predict_layers": 0, "num_shared_experts": 1,
        "output_router_logits": False, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-6, "rope_theta": 600000,
        "rotary_dim": 64, "routed_scaling_factor": 2.5, "router_dtype": "fp32", "score_function": "sigmoid",
        "topk_group": 4, "use_bias": False, "use_qk_norm": True, "use_qkv_bias": False, "use_rmsnorm": True,
        "vocab_size": 157184,
    }),
    "GptOssForCausalLM": (20.9, {
        **MIXTURE, "attention_bias": True, "experts_per_token": 4, "head_dim": 64, "hidden_size": 2880,
        "initial_context_length": 4096, "intermediate_size": 2880, "max_position_embeddings": 131072,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
        "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "vocab_size": 201088,
    }),
    "Qwen3_5ForConditionalGeneration": (27, {
        **SEEING, "text_config": {
            **DELTA, **DELTA_3_5, "hidden_size": 5120, "intermediate_size": 17408, "linear_num_value_heads": 48,
            "num_attention_heads": 24, "num_hidden_layers": 64, "num_key_value_heads": 4,
        },
    }),
    "Qwen3_5MoeForConditionalGeneration": (35, {
        **SEEING, "text_config": {
            **DELTA, **DELTA_3_5, **MIXTURE, "hidden_size": 2048, "linear_num_value_heads": 32,
            "moe_intermediate_size": 512, "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8,
            "num_hidden_layers": 40, "num_key_value_heads": 2, "shared_expert_intermediate_size": 512,
        },
    }),
    "Qwen3NextForCausalLM": (79.7, {
        **MIXTURE, **DELTA, "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 5120,
        "linear_num_value_heads": 32, "max_position_embeddings": 262144, "mlp_only_layers": [],
        "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512,
        "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2, "partial_rotary_factor": 0.25,
        "rope_theta": 10000000, "shared_expert_intermediate_size": 512, "use_sliding_window": False,
        "vocab_size": 151936,
    }),
}  # fmt: skip


NEMOTRON: dict[str, Any] = {
    **{key: value for key, value in SAME.items() if key not in ("hidden_act", "rms_norm_eps", "rope_scaling")},
    "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "chunk_size": 128, "conv_kernel": 4,
    "expand": 2, "head_dim": 128, "hidden_dropout": 0.0, "layer_norm_epsilon": 1e-5, "mamba_head_dim": 64,
    "mamba_hidden_act": "silu", "mamba_proj_bias": False, "max_position_embeddings": 262144, "mlp_bias": False,
    "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "n_group": 1, "n_groups": 8, "n_shared_experts": 1,
    "norm_eps": 1e-5, "norm_topk_prob": True, "num_attention_heads": 32, "num_key_value_heads": 2,
    "num_logits_to_keep": 1, "partial_rotary_factor": 1.0, "rescale_prenorm_residual": True,
    "residual_in_fp32": False, "rope_theta": 10000, "sliding_window": None, "ssm_state_size": 128,
    "time_step_floor": 1e-4, "time_step_limit": [0.0, math.inf], "time_step_max": 0.1, "time_step_min": 0.001,
    "topk_group": 1, "use_bias": False, "use_conv_bias": True, "use_mamba_kernels": True, "vocab_size": 131072,
}  # fmt: skip
#: Billions of parameters; the parameters of an adapter of rank 1 (train_mlp, train_attn, train_unembed) by Tinker's
#: hyperparam_utils.py in its cookbook; the fields of config.json besides NEMOTRON.
NEMOTRONS: dict[str, tuple[float, tuple[int, int, int], dict[str, Any]]] = {
    "Nano": (31.6, (11_346_176, 584_832, 133_760), {
        "hidden_size": 2688, "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "intermediate_size": 1856, "mamba_num_heads": 64, "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712, "n_routed_experts": 128, "num_experts_per_tok": 6,
        "num_hidden_layers": 52, "routed_scaling_factor": 2.5,
    }),
    "Super": (120.7, (111_349_760, 1_675_264, 135_168), {
        "hidden_size": 4096, "intermediate_size": 2688,
        "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*"
        "EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
        "mamba_num_heads": 128, "moe_intermediate_size": 2688, "moe_latent_size": 1024,
        "moe_shared_expert_intermediate_size": 5376, "moe_shared_expert_overlap": False,
        "mtp_hybrid_override_pattern": "*E", "n_routed_experts": 512, "num_experts_per_tok": 22,
        "num_hidden_layers": 88, "num_nextn_predict_layers": 1, "routed_scaling_factor": 5.0,
    }),
}  # fmt: skip


@pytest.mark.parametrize("model", NEMOTRONS)
def test_nemotron_has_the_parameters_that_are_published_and_its_adapters_those_of_tinker(
    model: str, tmp_path: Path
) -> None:
    billions, published, fields = NEMOTRONS[model]
    (tmp_path / "config.json").write_text(json.dumps(NEMOTRON | fields))
    config = read_config(model, tmp_path)
    assert check_model(ModelCard("m", tmp_path, config, ())).parameters / 1e9 == pytest.approx(billions, rel=1e-2)
    flags = [(False, True, False), (True, False, False), (False, False, True)]
    assert tuple(AdapterShape(config, 1, *only).num_parameters for only in flags) == published
    assert check_model(ModelCard("m", tmp_path, config, ())).kv_bytes_per_token == (
        len(config.attention_layers) * 2 * 2 * 128 * 2
    )


#: The parameters of an adapter of rank 1 by Tinker's cookbook, as above.
OF_TINKER: dict[str, tuple[int, int, int]] = {
    "DeepseekV3ForCausalLM": (94_307_328, 2_440_000, 136_448),
    "KimiK25ForConditionalGeneration": (144_583_680, 1_940_288, 171_008),
    "GptOssForCausalLM": (6_842_880, 497_664, 203_968),
    "Qwen3_5ForConditionalGeneration": (4_325_376, 2_965_504, 253_440),
    "Qwen3_5MoeForConditionalGeneration": (16_281_600, 1_013_760, 250_368),
}


@pytest.mark.parametrize("architecture", OF_TINKER)
def test_adapters_have_the_parameters_of_tinkers(architecture: str, tmp_path: Path) -> None:
    fields = SAME | PUBLISHED[architecture][1] | {"architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config, flags = read_config("m", tmp_path), [(False, True, False), (True, False, False), (False, False, True)]
    assert tuple(AdapterShape(config, 1, *only).num_parameters for only in flags) == OF_TINKER[architecture]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"time_step_limit": [0.001, math.inf]}, "time_step_limit=[0.001, inf]"),
        ({"hybrid_override_pattern": "MXE*" * 13}, "hybrid_override_pattern with 'X'"),
        ({"hybrid_override_pattern": "ME" * 26}, "without '*'"),
        ({"hybrid_override_pattern": "ME*"}, "num_hidden_layers=52"),
        ({"hybrid_override_pattern": None, "layers_block_type": ["mamba", "window"]}, "layers_block_type="),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu'"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'"),
        ({"use_bias": True}, "use_bias=true"),
        ({"use_conv_bias": False}, "use_conv_bias=False"),
        ({"n_groups": 7}, "n_groups=7"),
        ({"n_shared_experts": 2}, "n_shared_experts=2"),
        ({"moe_latent_size": 0.5}, "moe_latent_size=0.5"),
        ({"block_configs": [{"block_type": "mamba"}]}, "block_configs="),
    ],
)
def test_what_nemotron_may_not_have_is_refused_by_name(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(NEMOTRON | NEMOTRONS["Nano"][2] | change))
    with pytest.raises(UnsupportedModel) as refused:
        read_config("m", tmp_path)
    assert says in str(refused.value)


@pytest.mark.parametrize("architecture", PUBLISHED)
def test_published_configs_are_read_and_give_the_size_that_is_published(architecture: str, tmp_path: Path) -> None:
    billions, fields = PUBLISHED[architecture]
    (tmp_path / "config.json").write_text(json.dumps({**SAME, **fields, "architectures": [architecture]}))
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    found = check_model(read_card("m", tmp_path))
    assert found.parameters / 1e9 == pytest.approx(billions, rel=1e-2)


@pytest.mark.parametrize(
    ("architecture", "theta", "eps"), [("Qwen2ForCausalLM", 1e4, 1e-6), ("MixtralForCausalLM", 1e6, 1e-5)]
)
def test_a_missing_field_has_its_familys_default(architecture: str, theta: float, eps: float, tmp_path: Path) -> None:
    """The defaults of transformers' classes, as of its version 5."""
    fields = SAME | PUBLISHED[architecture][1] | {"architectures": [architecture]}
    for name in ("rope_theta", "rms_norm_eps"):
        del fields[name]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = read_config("m", tmp_path)
    assert (config.rope.theta, config.norm_eps) == (theta, eps)


@pytest.mark.parametrize(("share", "turned"), [(0.3, 19), (1.5, 96), (-0.5, -32)])
def test_a_rope_that_turns_an_odd_number_is_refused(share: float, turned: int, tmp_path: Path) -> None:
    fields = SAME | PUBLISHED["Glm4MoeForCausalLM"][1] | {"architectures": ["Glm4MoeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(fields | {"head_dim": 64, "partial_rotary_factor": share}))
    with pytest.raises(UnsupportedModel, match=f"{turned} of 64 numbers turn"):
        read_config("m", tmp_path)


@pytest.mark.parametrize(
    ("architecture", "without", "says"),
    [
        ("DeepseekV3ForCausalLM", "n_group", "n_group=None"),
        ("DeepseekV3ForCausalLM", "topk_group", "topk_group=None"),
        ("DeepseekV3ForCausalLM", "routed_scaling_factor", "routed_scaling_factor=None"),
        ("DeepseekV3ForCausalLM", "norm_topk_prob", "norm_topk_prob=None"),
        ("GptOssForCausalLM", "rope_scaling", "no rope_scaling"),
    ],
)
def test_a_field_without_a_common_default_must_be_given(
    architecture: str, without: str, says: str, tmp_path: Path
) -> None:
    """Null counts as missing: libraries take it for false, or for another number."""
    fields = SAME | PUBLISHED[architecture][1] | {"architectures": [architecture], without: None}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UnsupportedModel) as refused:
        read_config("m", tmp_path)
    assert says in str(refused.value)


@pytest.mark.parametrize(("family", "with_keys"), [("qwen3-next", 2), ("nemotron-h", 1)])
def test_a_hybrid_has_a_state_for_each_sequence_and_keys_and_values_in_some_layers(
    family: str, with_keys: int, tmp_path: Path
) -> None:
    decoder = ours(reference(family), tmp_path)
    layer: Any = decoder.layers[0].attn
    x = torch.zeros(3, layer.inputs.shape[0])
    found = check_model(ModelCard("m", tmp_path, decoder.config, ()), "bfloat16")
    assert found.state_bytes == 2 * sum(part.nbytes for part in layer.run(x, None)[1])
    assert found.kv_bytes_per_token == with_keys * 2 * 2 * 32 * 2  # layers, k and v, heads, head_dim, bytes
    assert f"state     {found.state_bytes:,} bytes per sequence in float32" in found.lines()
    assert "lookup    off: states of recurrent layers cannot be taken back" in found.lines()


def test_the_command_says_what_the_built_in_model_is() -> None:
    shown = CliRunner().invoke(weftd, ["model", "check", str(TINY_PATH), "--dtype", "float32"])
    assert shown.exit_code == 0, shown.output
    assert "family    Qwen3 MoE (Qwen3MoeForCausalLM): supported" in shown.output
    numel = check_model(read_card("tiny", TINY_PATH)).parameters
    assert f"weights   {numel:,} parameters, {numel * 4 / 1e6:.1f} MB in float32" in shown.output
    assert f"cache     {4 * 2 * 2 * 32 * 4:,} bytes per token" in shown.output  # layers, k and v, heads, head_dim


def test_the_command_names_the_field_that_is_not_supported(tmp_path: Path) -> None:
    config = json.loads((TINY_PATH / "config.json").read_text()) | {"attention_chunk_size": 8192}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shown = CliRunner().invoke(weftd, ["model", "check", str(tmp_path)])
    assert shown.exit_code == 2
    assert "attention_chunk_size=8192, a field that is not known here" in shown.output
    (tmp_path / "config.json").write_text("{")
    shown = CliRunner().invoke(weftd, ["model", "check", str(tmp_path)])
    assert (shown.exit_code, "is not valid JSON" in shown.output) == (2, True)


def test_the_check_imports_no_torch() -> None:
    code = "import sys, workers.model.planning.check; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
