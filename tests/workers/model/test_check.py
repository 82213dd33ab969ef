"""`weftd model check`: what it says of a model folder, against the loaded model; and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from api.cli import weftd
from tests.workers.model.models import FAMILIES, ours, reference
from workers.model.adapter import Adapter, AdapterShape
from workers.model.card import ModelCard, read_card
from workers.model.check import check_model, trained
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
    assert ("mlp.experts.*.gate_proj" in names) == bool(decoder.config.num_experts)
    assert ("mlp.gate_proj" in names) == any(name.endswith(".mlp.gate_proj.weight") for name in model.state_dict())


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
    code = "import sys, workers.model.check; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
