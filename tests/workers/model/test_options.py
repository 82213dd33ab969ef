"""Options of a config.json that the tiny models of `models.py` do not have: each is computed as transformers does, or
refused. `WEFT_SOAK=30 python -m pytest tests/workers/model/test_options.py` searches from a random seed."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.search import chance, examples
from tests.workers.model.models import FAMILIES, HYBRID, packed, reference
from tests.workers.test_families import EACH
from workers.model.attend import PackedAttend
from workers.model.base.weights import load_decoder
from workers.model.config import UnsupportedModel

Options = dict[str, Sequence[Any]]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
    },
    YARN,
    YARN | {"truncate": False, "beta_slow": 2.0},
    YARN | {"attention_factor": 1.3},
    YARN | {"mscale": 0.8, "mscale_all_dim": 0.5, "beta_fast": 8},
    YARN | {"mscale": 0.8},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    YARN | {"rope_type": "default", "mscale": 1.0, "mscale_all_dim": 1.0},
    YARN | {"beta_fast": None, "attention_factor": None},
    YARN | {"truncate": None},
]  # fmt: skip
EVERY: Options = {
    "tie_word_embeddings": [True, False], "num_key_value_heads": [1, 2, 4], "head_dim": [16, 24, 40],
    "hidden_size": [64, 80], "rms_norm_eps": [1e-3, 1e-5], "rope_parameters": ROPES, "attention_bias": [True, False],
    "mlp_bias": [True, False], "intermediate_size": [40, 96], "num_attention_heads": [4, 8],
}  # fmt: skip
WINDOW: Options = {"use_sliding_window": [True, False], "sliding_window": [3, 9, None], "max_window_layers": [0, 1, 5]}
EXPERTS: Options = {
    "num_experts": [3, 5], "num_experts_per_tok": [1, 3], "moe_intermediate_size": [24], "norm_topk_prob": [True, False]
}  # fmt: skip
GROUPS: Options = {
    "n_group": [1, 2, 8], "topk_group": [1, 2], "num_experts_per_tok": [1, 4, 8], "norm_topk_prob": [True, False],
    "n_routed_experts": [8, 24], "n_shared_experts": [1, 3], "first_k_dense_replace": [0, 2, 9],
    "routed_scaling_factor": [0.7, 1.0], "use_qk_norm": [True, False],
}  # fmt: skip
LATENT: Options = {
    **GROUPS, "q_lora_rank": [None, 24], "kv_lora_rank": [16], "v_head_dim": [8, 32], "rope_interleave": [True, False],
    "num_key_value_heads": [4, 2], "head_dim": [8], "num_attention_heads": [4],
}  # fmt: skip
DELTA: Options = {
    "layer_types": [None, ["full_attention", *["linear_attention"] * 3], HYBRID["layer_types"][::-1]],
    "full_attention_interval": [2, 3], "linear_num_key_heads": [1, 2], "linear_num_value_heads": [2, 6],
    "linear_key_head_dim": [8], "linear_value_head_dim": [16], "linear_conv_kernel_dim": [2, 3],
    "shared_expert_intermediate_size": [24], "decoder_sparse_step": [2], "mlp_only_layers": [[], [1]],
    "num_hidden_layers": [4],
}  # fmt: skip
OPTIONS: dict[str, Options] = {
    "llama": {}, "qwen2": WINDOW, "qwen2-yarn": WINDOW, "qwen3": WINDOW, "mistral": {"sliding_window": [None, 4]},
    "moe": EXPERTS | WINDOW | {"decoder_sparse_step": [2], "mlp_only_layers": [[1]]},
    "mixtral": {"num_local_experts": [3, 5], "num_experts_per_tok": [1, 3], "sliding_window": [None, 4]},
    "olmoe": EXPERTS | {"clip_qkv": [None, 0.5], "num_key_value_heads": [4]},
    "glm4-moe": GROUPS, "deepseek": LATENT, "deepseek-plain": LATENT, "glm4-moe-lite": LATENT,
    "gpt-oss": {
        "num_local_experts": [3, 5], "num_experts_per_tok": [1, 2], "sliding_window": [3], "swiglu_limit": [0.2, 7.0],
        "layer_types": [["full_attention"] * 3, ["sliding_attention"] * 3], "swiglu_alpha": [1.0],
    },
    "qwen3-next": DELTA | EXPERTS, "qwen3.5": DELTA, "qwen3.5-moe": DELTA | EXPERTS,
    "nemotron-h": GROUPS | {
        "n_groups": [1, 3], "ssm_state_size": [16], "mamba_head_dim": [8, 24], "conv_kernel": [2, 3],
        "use_conv_bias": [True], "use_bias": [False], "moe_latent_size": [None, 24],
        "hybrid_override_pattern": ["M*EM-", "*M-M-", "EE*MM"], "layer_norm_epsilon": [1e-3],
        "tie_word_embeddings": [False],  # transformers ties nothing here, whatever a config says; ours refuses true
    },
}  # fmt: skip
#: The spellings of config.json: as transformers 5 writes it, and as earlier versions did.
SPELLINGS = ["new", "old"]


def agrees(family: str, folder: Path, spelling: str = "new", **options: Any) -> bool:
    """Check that a model with these options is computed as transformers does; False if either of the two refuses it."""
    try:
        model = reference(family, **deepcopy(options))  # a config writes into the rope that it is given
        model(torch.tensor([[1, 2, 3]]), use_cache=False)
    except Exception:  # any error means that its own library refuses it
        return False
    model.save_pretrained(folder)
    if spelling == "old":
        config = json.loads((folder / "config.json").read_text())
        rope = config.pop("rope_parameters", None) or {}
        config["rope_theta"] = rope.pop("rope_theta", 1e4)
        if "partial_rotary_factor" in rope:
            config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        if (kind := rope.pop("rope_type", "default")) != "default":
            config["rope_scaling"] = {"type": kind, **rope}
        (folder / "config.json").write_text(json.dumps(config))
        model = type(model).from_pretrained(folder).eval()
    try:
        decoder = load_decoder(folder)
    except UnsupportedModel:
        return False
    tokens, positions = packed([45], decoder.config.vocab_size)
    with torch.no_grad():
        got = decoder.logits(decoder(tokens, positions, PackedAttend([45])))
        torch.testing.assert_close(got, model(tokens[None], use_cache=False).logits[0], atol=1e-4, rtol=1e-4)
    return True


def chosen(family: str, free: random.Random) -> dict[str, Any]:
    """Options, each chosen with a probability of one in four."""
    defaults = set(FAMILIES[family][1]().to_dict())
    options = EVERY | OPTIONS[family]
    return {
        name: free.choice(choices)
        for name, choices in options.items()
        if free.random() < 0.25 and (name in defaults or name in OPTIONS[family])
    }


@pytest.mark.parametrize("rope", ROPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "deepseek", "gpt-oss", "qwen3.5"])
def test_every_rope_is_computed_as_by_transformers_or_refused(
    family: str, rope: dict[str, Any], tmp_path: Path
) -> None:
    """Also with fields that another kind of rope left in it, and with fields that are null."""
    refused = rope["rope_type"] == "dynamic" or rope.get("truncate", True) is None
    refused |= "partial_rotary_factor" in rope and family != "qwen3.5"
    assert agrees(family, tmp_path, rope_parameters=rope) != refused


@pytest.mark.search
@pytest.mark.parametrize("family", OPTIONS)
def test_any_options_are_computed_as_by_transformers_or_refused(family: str, tmp_path: Path) -> None:
    free, computed = chance(list(OPTIONS).index(family)), 0
    for number in range(examples(8)):
        options, spelling = chosen(family, free), free.choice(SPELLINGS)
        print(f"{family}, {spelling}: {options}")
        computed += agrees(family, tmp_path / str(number), spelling, **options)
        if computed == examples(1):
            break
    assert computed == examples(1), "all others were refused"


def test_every_family_is_searched() -> None:
    assert set(OPTIONS) | {"bailing", "nemotron-h-latent"} == set(EACH)
