"""Adapters that PEFT trained in other ways than plain LoRA: imported as what they are, or refused by name."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from tests.workers.model.adapters.test_peft_format import our_logprobs, their_logprobs
from tests.workers.model.models import ours, reference
from workers.model.adapters.adapter import load_adapter
from workers.model.adapters.imported import CannotImport, read_adapter

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def trained(folder: Path, save_embedding_layers: bool | str = "auto", **how: Any) -> None:
    """An adapter of qwen3 as PEFT saves it; every factor has moved from its first value."""
    model = get_peft_model(
        reference("qwen3"), LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ATTENTION, **how})
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.05)
    model.save_pretrained(folder, save_embedding_layers=save_embedding_layers)


@pytest.mark.parametrize("begun", [True, False, "gaussian", "orthogonal"])
def test_an_adapter_of_any_start_that_keeps_the_base_computes_as_in_peft(tmp_path: Path, begun: bool | str) -> None:
    decoder = ours(reference("qwen3"), tmp_path / "model")
    trained(tmp_path / "theirs", init_lora_weights=begun)
    (tmp_path / "ours").mkdir()
    read_adapter(tmp_path / "theirs", decoder.config).write(tmp_path / "ours", "tiny")
    adapter = load_adapter(tmp_path / "ours", decoder.config).adapter
    theirs = PeftModel.from_pretrained(reference("qwen3"), tmp_path / "theirs").eval()
    assert (their_logprobs(theirs, decoder) - our_logprobs(decoder, adapter)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
        ({"alora_invocation_tokens": [5, 7]}, "alora_invocation_tokens is set"),
    ],
    ids=str,
)
def test_what_computes_something_else_in_peft_is_refused(tmp_path: Path, how: dict[str, Any], says: str) -> None:
    """Their tensors look like plain LoRA's: imported as that, they would give other numbers than in PEFT."""
    decoder = ours(reference("qwen3"), tmp_path / "model")
    trained(tmp_path / "theirs", **{"task_type": "CAUSAL_LM", **how})
    with pytest.raises(CannotImport, match=says):
        read_adapter(tmp_path / "theirs", decoder.config)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_an_impossible_field_of_the_configuration_is_named(tmp_path: Path) -> None:
    """The user reads which field it is: no NaN-making scale, no traceback, no warning of numpy's."""
    decoder = ours(reference("qwen3"), tmp_path / "model")
    trained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "adapter_config.json"
    fields = json.loads(file.read_text())
    for wrong, says in (
        ({"lora_alpha": math.nan}, "lora_alpha is nan"),
        ({"lora_alpha": math.inf}, "lora_alpha is inf"),
        ({"lora_alpha": -1e39}, "lora_alpha is -1e+39"),
        ({"lora_alpha": 10**400}, "bad or missing field"),
        ({"r": None}, "r is None"),
        ({"r": 4.9}, "r is 4.9"),
        ({"r": None, "rank_pattern": {"q_proj": 4}}, "r is None"),
        ({"r": 0}, "at least 1, got 0"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern is {'q_proj': 8}"),
        ({"rank_pattern": {"in_proj_qkv": 12}}, "alpha_pattern is {}"),
        ({"alpha_pattern": {"q_proj": 16}}, "alpha_pattern is {'q_proj': 16}"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern is"),
        ({"use_dora": True}, "use_dora is True; only False"),
        ({"use_rslora": True}, "use_rslora is True; only False"),
        ({"bias": "all"}, "bias is 'all'; only 'none'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
        ({"peft_type": "LOHA"}, "not the configuration of a LoRA adapter"),
    ):
        file.write_text(json.dumps({**fields, **wrong}))
        with pytest.raises(CannotImport, match=re.escape(says)):
            read_adapter(tmp_path / "theirs", decoder.config)
    file.unlink()
    with pytest.raises(CannotImport, match=r"adapter_config\.json is not there: name a folder that PEFT, or"):
        read_adapter(tmp_path / "theirs", decoder.config)


def test_a_trained_head_is_imported_if_saved_without_the_bases(tmp_path: Path) -> None:
    """By default PEFT saves the base's head beside the factors; the refusal says how to save without it."""
    decoder = ours(reference("qwen3"), tmp_path / "model")
    trained(tmp_path / "both", target_modules=[*ATTENTION, "lm_head"])
    with pytest.raises(CannotImport, match="save_embedding_layers=False"):
        read_adapter(tmp_path / "both", decoder.config)
    trained(tmp_path / "theirs", save_embedding_layers=False, target_modules=[*ATTENTION, "lm_head"])
    (tmp_path / "ours").mkdir()
    read_adapter(tmp_path / "theirs", decoder.config).write(tmp_path / "ours", "tiny")
    adapter = load_adapter(tmp_path / "ours", decoder.config).adapter
    theirs = PeftModel.from_pretrained(reference("qwen3"), tmp_path / "theirs").eval()
    assert (their_logprobs(theirs, decoder) - our_logprobs(decoder, adapter)).abs().max() < 1e-4
