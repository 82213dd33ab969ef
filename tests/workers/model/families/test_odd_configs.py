"""Every field of every family's config.json, set to values that nobody should write there: the config is read, or the
field refused by its name; no other error is raised, and nothing takes long or much memory."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.workers.model.planning.test_check import MIXTURE, NEMOTRON, NEMOTRONS, PUBLISHED, SAME
from workers.model.card import ModelCard, UnsupportedModel, read_card
from workers.model.config import DecoderConfig
from workers.model.families.read import read_config
from workers.model.families.table import FAMILIES, VISION
from workers.model.planning.check import check_model

ODD: list[Any] = [0, -1, 1.5, 3, True, "x", None, 10**9, 10**400, [], [[1]], {}, {"a": {}}, math.nan, math.inf]
REMOVED = object()
KINDS = ("linear_attention", "full_attention")
DENSE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 96, "max_position_embeddings": 128,
    "attention_bias": False, "rope_theta": 500000.0,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    **{name: SAME | fields | {"architectures": [name]} for name, (_, fields) in PUBLISHED.items()},
    **{f"Nemotron {name}": NEMOTRON | fields for name, (_, _, fields) in NEMOTRONS.items()},
    "LlamaForCausalLM": SAME | DENSE | {
        "architectures": ["LlamaForCausalLM"], "mlp_bias": False, "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "Qwen3ForCausalLM": SAME | DENSE | {
        "architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "sliding_window": 32,
        "max_window_layers": 2, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "Qwen3MoeForCausalLM": SAME | DENSE | MIXTURE | {
        "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "mlp_only_layers": [], "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True, "sliding_window": None,
        "use_sliding_window": False,
    },
}  # fmt: skip


def changed(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    config = inner = copy.deepcopy(config)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    if value is REMOVED:
        del inner[path[-1]]
    return config


def paths(config: dict[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        yield (*at, key)
        if isinstance(value, dict):
            yield from paths(value, (*at, key))


def test_every_family_of_the_table_is_held_here() -> None:
    assert {VISION.get(name, name) for fields in CONFIGS.values() for name in fields["architectures"]} == set(FAMILIES)


@pytest.mark.parametrize("model", CONFIGS)
def test_whatever_a_field_says_it_is_read_or_refused_by_name(model: str, tmp_path: Path) -> None:
    config, file = CONFIGS[model], tmp_path / "config.json"
    seen: set[DecoderConfig] = set()
    for path in paths(config):
        for value in [*ODD, REMOVED]:
            file.unlink(missing_ok=True)  # a file that is cut and written again goes to the disk at once, on ext4
            file.write_text(json.dumps(changed(config, path, value)))
            try:
                found = read_config("m", tmp_path)
            except UnsupportedModel as error:
                problem = str(error).split("; supported:")[0]
                # In a description of quantised weights, the error names the weights.
                named = [name for name in path if name in (path[-1], "quantization_config") and name in problem]
                assert named or path == ("text_config",), (path, value, problem)
            else:
                if found not in seen:
                    check_model(ModelCard("m", tmp_path, found, ()))
                seen.add(found)


@pytest.mark.parametrize("model", [model for model, config in CONFIGS.items() if "text_config" in config])
def test_fields_beside_text_config_are_not_read(model: str, tmp_path: Path) -> None:
    """Libraries read a text model's fields only within text_config: from outside they would be another model's."""
    config, file = CONFIGS[model], tmp_path / "config.json"
    file.write_text(json.dumps(config))
    found = read_config("m", tmp_path)
    for key in config["text_config"].keys() - {"tie_word_embeddings", "quantization_config"}:
        for outside in (None, config["text_config"].get(key)):
            file.write_text(json.dumps(config | {key: outside}))
            assert read_config("m", tmp_path) == found, key
    for key in ("rope_theta", "rms_norm_eps", "num_experts_per_tok", "max_position_embeddings", "rope_scaling"):
        file.write_text(json.dumps(config | {key: 7}))
        with pytest.raises(UnsupportedModel, match=f"{key}=7 outside of text_config"):
            read_config("m", tmp_path)


@pytest.mark.parametrize("says", [False, None, 0])
@pytest.mark.parametrize("model", CONFIGS)
def test_attention_in_both_directions_is_refused(model: str, says: Any, tmp_path: Path) -> None:
    """Libraries take each of these values for attention in both directions, which embedding models have. No other field
    of such a model tells, and served with causal attention it would give other numbers."""
    config = CONFIGS[model]
    for field, refused in ((says, True), (True, False)):
        text = {"text_config": config["text_config"] | {"is_causal": field}} if "text_config" in config else {}
        (tmp_path / "config.json").write_text(json.dumps(config | (text or {"is_causal": field})))
        if refused:
            with pytest.raises(UnsupportedModel, match="is_causal="):
                read_config("m", tmp_path)
        else:
            read_config("m", tmp_path)


@pytest.mark.parametrize("value", [value for value in ODD if value not in (0, 3, None, [])])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_what_ends_a_text_is_a_token_or_several(file: str, value: Any, tmp_path: Path) -> None:
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["LlamaForCausalLM"]))
    assert read_card("m", tmp_path).eos_token_ids == (2,)
    before = json.loads((tmp_path / file).read_text()) if (tmp_path / file).exists() else {}
    (tmp_path / file).write_text(json.dumps(before | {"eos_token_id": value}))
    with pytest.raises(UnsupportedModel, match=f"{file} has eos_token_id="):
        read_card("m", tmp_path)


@pytest.mark.parametrize("model", [name for name in CONFIGS if name.startswith(("Qwen3Next", "Qwen3_5"))])
@pytest.mark.parametrize(("kind", "other"), [KINDS, KINDS[::-1]])
def test_a_hybrid_has_layers_of_both_kinds(model: str, kind: str, other: str, tmp_path: Path) -> None:
    """Without a layer of attention libraries compute nothing, and plan and cache would divide by the 0 bytes of a
    token."""
    config = copy.deepcopy(CONFIGS[model])
    text = config.get("text_config", config)
    text["layer_types"] = [kind] * text["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=f"layer_types without '{other}'"):
        read_config("m", tmp_path)


def test_json_that_is_nested_without_end_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": ' + "[" * 10**6)
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        read_config("m", tmp_path)


@pytest.mark.parametrize("model", ["Glm4MoeForCausalLM", "Qwen3NextForCausalLM", "BailingMoeV2ForCausalLM"])
def test_a_share_of_the_head_that_is_null_is_not_the_familys(model: str, tmp_path: Path) -> None:
    """With null libraries turn the whole head; if the field is missing, the family's share of it."""
    (tmp_path / "config.json").write_text(json.dumps(changed(CONFIGS[model], ("partial_rotary_factor",), REMOVED)))
    assert read_config("m", tmp_path).rope.partial < 1
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[model] | {"partial_rotary_factor": None}))
    with pytest.raises(UnsupportedModel, match="partial_rotary_factor=None"):
        read_config("m", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["LlamaForCausalLM"] | {"partial_rotary_factor": None}))
    assert read_config("m", tmp_path).rope.partial == 1


def test_a_rope_that_is_said_twice_must_be_the_same(tmp_path: Path) -> None:
    """For instance YaRN as rope_scaling, as makers advise, beside the rope_parameters that transformers 5 wrote:
    transformers takes rope_scaling, and a user would not notice if YaRN were left out."""
    plain, scaled = {"rope_type": "default", "rope_theta": 1e6}, {"rope_type": "yarn", "factor": 4.0}
    for scaling, refused in ((scaled, True), (plain, False)):
        fields = CONFIGS["Qwen3ForCausalLM"] | {"rope_scaling": scaling, "rope_parameters": plain}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        if refused:
            with pytest.raises(UnsupportedModel, match=r"rope_scaling=.* beside rope_parameters="):
                read_config("m", tmp_path)
        else:
            assert read_config("m", tmp_path).rope.theta == 1e6
