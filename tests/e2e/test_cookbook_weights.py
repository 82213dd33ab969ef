"""The cookbook's own download, merge and conversion, where the cookbook is installed (`make cookbook`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.e2e.conftest import BASE_MODEL, Weftd
from tests.e2e.data import supervised
from tests.e2e.test_official_sdk import losses, weights_of
from workers.model.tiny import TINY_PATH

pytestmark = pytest.mark.server


@pytest.mark.parametrize("external", [False, True], ids=["training state", "external weights"])
def test_download_and_build_hf_model(
    external: bool, official: Callable[..., Any], weftd: Weftd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = pytest.importorskip("tinker_cookbook.weights")
    monkeypatch.setenv("TINKER_API_KEY", weftd.key())
    run = official().create_lora_training_client(BASE_MODEL, rank=8).result()
    losses(run, 3)
    path = (run.save_weights_external("w") if external else run.save_state("w")).result().path
    adapter = weights.download(tinker_path=path, output_dir=str(tmp_path / "adapter"), base_url=weftd.url)
    merged, converted = tmp_path / "merged", tmp_path / "converted"
    weights.build_hf_model(
        base_model=str(TINY_PATH), adapter_path=adapter, output_path=str(merged), dtype="float32", merge_strategy="full"
    )
    assert np.abs(logprobs_of(merged) - weights_of(run)).max() < 1e-4
    weights.build_lora_adapter(base_model=str(TINY_PATH), adapter_path=adapter, output_path=str(converted))
    theirs, ours = (load_file(f / "adapter_model.safetensors") for f in (converted, Path(adapter) / "peft"))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)


def logprobs_of(folder: Path) -> np.ndarray:
    """The same as `weights_of` of a run, computed by a transformers model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for datum in supervised(seed=99):
        with torch.no_grad():
            logits = model(torch.tensor([datum.model_input.to_ints()])).logits[0]
        targets = datum.loss_fn_inputs["target_tokens"].to_torch().long()
        found.append(torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0].numpy())
    return np.concatenate(found)
