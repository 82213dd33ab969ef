"""An adapter that another tool has trained is imported, sampled from and trained on, with the official SDK."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tinker import types

from tests.e2e.conftest import BASE_MODEL, Weftd, weftd_command
from tests.e2e.data import prompt, supervised
from workers.model.adapters.adapter import Adapter
from workers.model.adapters.peft_format import write_peft
from workers.model.adapters.shape import AdapterShape
from workers.model.families.read import read_config
from workers.model.tiny import TINY_PATH

pytestmark = pytest.mark.server
RANK = 4


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """An adapter in PEFT's layout and bfloat16, with a pair of factors for each expert."""
    shape = AdapterShape(read_config("tiny", TINY_PATH), RANK, train_unembed=False, shared=False)
    adapter = Adapter.init(shape, seed=3, scale=2.0)
    for slot in shape.slots.values():
        if not slot.fan_in:
            adapter.view(slot.name).normal_(std=0.05, generator=torch.Generator().manual_seed(4))
    tensors = {name: view.contiguous().numpy() for name, view in adapter.views.items()}
    write_peft(tmp_path / "foreign", tensors, base_model="someone/else", rank=RANK, alpha=2.0 * RANK)
    file = tmp_path / "foreign" / "adapter_model.safetensors"
    save_file({name: x.bfloat16() for name, x in load_file(file).items()}, file)
    return tmp_path / "foreign"


def imported(weftd: Weftd, *arguments: str) -> subprocess.CompletedProcess[str]:
    return weftd_command("adapter", "import", "--data-dir", weftd.data_dir, *arguments)


def test_train_on_and_sample_from_an_imported_adapter(
    weftd: Weftd, official: Callable[..., Any], foreign: Path
) -> None:
    service = official("acme")
    done = imported(weftd, "--org", "acme", "--name", "theirs", str(foreign))
    assert done.returncode == 0, done.stderr
    path = done.stdout.strip()
    run = service.create_training_client_from_state(path).result()
    data = supervised(seed=9)
    before = run.forward(data, "cross_entropy").result()
    plain = service.create_lora_training_client(BASE_MODEL, rank=RANK).result().forward(data, "cross_entropy").result()
    ours, base = (np.concatenate([o["logprobs"].to_numpy() for o in f.loss_fn_outputs]) for f in (before, plain))
    assert np.abs(ours - base).max() > 1e-3
    for _ in range(3):
        run.forward_backward(data, "cross_entropy").result()
        run.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    after = run.forward(data, "cross_entropy").result()
    assert after.metrics["loss:sum"] < before.metrics["loss:sum"]
    sampler = run.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[])
    (drawn,) = sampler.sample(prompt(), 1, params).result().sequences
    assert len(drawn.tokens) == 8
    resumed = service.create_training_client_from_state(run.save_state("mine").result().path).result()
    again = resumed.forward(data, "cross_entropy").result()
    assert again.metrics["loss:sum"] == after.metrics["loss:sum"]


def test_what_cannot_be_imported_is_refused_by_name(weftd: Weftd, foreign: Path) -> None:
    weftd.key()
    config = foreign / "adapter_config.json"
    fields = json.loads(config.read_text())
    for change, says in (
        ({"use_dora": True}, "use_dora"),
        ({"r": 5}, "the model needs"),
        ({"peft_type": "IA3"}, "peft_type LORA"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
    ):
        config.write_text(json.dumps({**fields, **change}))
        done = imported(weftd, "--org", "acme", str(foreign))
        assert (done.returncode, done.stdout) == (2, "")
        assert says in done.stderr
        assert len(done.stderr.splitlines()) == 1
    config.write_text(json.dumps(fields))
    assert "no organisation named" in imported(weftd, "--org", "nobody", str(foreign)).stderr
    assert "no model" in imported(weftd, "--org", "acme", "--model", "x", str(foreign)).stderr
