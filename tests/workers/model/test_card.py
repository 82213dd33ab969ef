"""What is read from a model folder, and what is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from workers.model.card import UnsupportedModel, read_card
from workers.model.config import RopeConfig

QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "sliding_window": 4096,
    "use_sliding_window": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "eos_token_id": 151645,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def dense(architecture: str) -> dict[str, Any]:
    """A config without the fields that only mixtures have."""
    of_mixtures = {
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
        "decoder_sparse_step",
    }
    return {k: v for k, v in QWEN3_MOE.items() if k not in of_mixtures} | {"architectures": [architecture]}


def folder(path: Path, config: dict[str, Any], without: str = "") -> Path:
    """A model folder whose weights and tokenizer are empty files, without the one named."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "tokenizer.json"):
        if name != without:
            (path / name).touch()
    return path


def test_qwen3_30b_a3b_is_read(tmp_path: Path) -> None:
    path = folder(tmp_path, QWEN3_MOE)
    (path / "generation_config.json").write_text('{"eos_token_id": [151643, 151645]}')
    card = read_card("Qwen/Qwen3-30B-A3B", path)
    assert (card.name, card.path, card.architecture) == ("Qwen/Qwen3-30B-A3B", path, "Qwen3MoeForCausalLM")
    assert (card.vocab_size, card.context_length, card.hidden_size, card.num_layers) == (151936, 40960, 2048, 48)
    assert card.eos_token_ids == (151643, 151645)
    config = card.config
    assert (config.num_experts, config.experts_per_token, config.norm_topk) == (128, 8, True)
    assert config.rope == RopeConfig(theta=1e6)
    assert config.qk_norm == "head"
    assert all(config.is_moe(i) for i in range(48))


def test_both_layouts_of_rope_read_alike(tmp_path: Path) -> None:
    llama = {**dense("LlamaForCausalLM"), "sliding_window": None, "use_sliding_window": None}
    old = folder(tmp_path / "old", {**llama, "rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE})
    new_config = {k: v for k, v in llama.items() if k not in ("rope_theta", "rope_scaling")}
    new = folder(tmp_path / "new", {**new_config, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 5e5}})
    rope = read_card("m", old).config.rope
    assert rope == read_card("m", new).config.rope == RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)
    assert read_card("m", old).config.qk_norm == ""
    assert read_card("m", old).config.num_experts == 0


def test_experts_are_counted_under_either_name(tmp_path: Path) -> None:
    config = {k: v for k, v in QWEN3_MOE.items() if k != "num_experts"}
    path = folder(tmp_path, {**config, "num_local_experts": 64, "mlp_only_layers": [3], "decoder_sparse_step": 2})
    read = read_card("m", path).config
    assert read.num_experts == 64
    assert [i for i in range(6) if read.is_moe(i)] == [1, 5]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*supported: LlamaForCausalLM"),
        ({"architectures": None}, r"architectures=\[\]"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantization_config \(awq\)"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantization_config \(fp8\) with weight_block_size=None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'; supported: 'silu'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types with 'sliding_attention'"),
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping=30\.0, a field that is not known here"),
        ({"query_pre_attn_scalar": 64}, "query_pre_attn_scalar=64, a field"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
            "rope_type='dynamic'; supported: rope_type default, lin",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "short_factor": [1]}}, r"yarn rope with short_factor=\[1\]"),
        ({"rope_scaling": {"type": "linear"}}, "linear rope without factor"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            "llama3 rope without high_freq_factor, low_freq_factor",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_experts_per_tok": 200}, "num_experts_per_tok=200"),
        ({"hidden_size": None}, "hidden_size=None"),
        ({"num_experts_per_tok": -1}, "num_experts_per_tok=-1"),
        ({"moe_intermediate_size": -768}, "moe_intermediate_size=-768"),
        ({"rms_norm_eps": 0.0}, r"rms_norm_eps=0\.0"),
        ({"mlp_only_layers": 3}, "mlp_only_layers=3"),
        ({"layer_types": 3}, "layer_types=3"),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}}, "rope_parameters={'full_att"),
        ({"num_key_value_heads": 5}, "32 heads over 5 key-value heads"),
    ],
)
def test_unsupported_features_are_named(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = folder(tmp_path, {**QWEN3_MOE, **change})
    with pytest.raises(UnsupportedModel, match=named) as error:
        read_card("org/model", path)
    assert "'org/model'" in str(error.value)
    assert str(path) in str(error.value)
    assert isinstance(error.value, ValueError)


def test_windows_are_read_as_each_family_means_them(tmp_path: Path) -> None:
    def windows(config: dict[str, Any], **change: Any) -> list[int]:
        read = read_card("m", folder(tmp_path, {**config, "num_hidden_layers": 4, **change})).config
        return [read.window_of(layer) for layer in range(4)]

    qwen2, mistral = dense("Qwen2ForCausalLM") | {"use_sliding_window": True}, dense("MistralForCausalLM")
    assert windows(QWEN3_MOE) == [0, 0, 0, 0]
    assert windows(QWEN3_MOE, use_sliding_window=True) == [4096] * 4
    assert windows(qwen2, max_window_layers=3) == [0, 0, 0, 4096]
    assert windows(qwen2, layer_types=["sliding_attention", "full_attention"] * 2) == [4096, 0, 4096, 0]
    assert windows(qwen2, use_sliding_window=False, max_window_layers=2) == [0, 0, 0, 0]
    assert windows(mistral) == [4096] * 4
    assert windows(mistral, sliding_window=None) == [0] * 4


@pytest.mark.parametrize(
    ("without", "named"), [("model.safetensors", "no model.safetensors"), ("tokenizer.json", "no tokenizer")]
)
def test_incomplete_folders_are_named(without: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read_card("m", folder(tmp_path, QWEN3_MOE, without))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = folder(tmp_path, QWEN3_MOE, "model.safetensors")
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    with pytest.raises(UnsupportedModel, match=r"one\.safetensors"):
        read_card("m", path)


def test_a_missing_folder_and_a_broken_config_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="no such folder"):
        read_card("m", tmp_path / "absent")
    with pytest.raises(UnsupportedModel, match=r"no config\.json"):
        read_card("m", tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        read_card("m", tmp_path)


def test_importing_the_card_imports_no_torch() -> None:
    code = "import sys, workers.model.card; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
