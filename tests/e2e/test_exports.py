"""`weft download` gives a folder that stock PEFT loads rightly; its `verify.py` says so, or that it does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import weft
from safetensors.numpy import load_file

from tests.e2e.conftest import BASE_MODEL, BIN, Weftd
from tests.e2e.test_weft_sdk import client, train
from workers.model.tiny import TINY_PATH

pytestmark = pytest.mark.server

Weft = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def checkpoints(weftd: Weftd) -> dict[str, str]:
    """A trained adapter with all its parts, under a path of each kind."""
    with client(weftd) as service:
        run = service.create_lora_training_client(BASE_MODEL, rank=4, seed=5)
        train(run, 6)
        saves = (run.save_weights_for_sampler, run.save_state, run.save_weights_external)
        return {save.__name__: save("w").result(60).path for save in saves}


@pytest.fixture
def command(weftd: Weftd, tmp_path: Path) -> Weft:
    environment = {**os.environ, "WEFT_BASE_URL": weftd.url, "WEFT_API_KEY": weftd.key("loom"), "HF_HUB_OFFLINE": "1"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(BIN / "weft"), *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )

    return run


def verified(folder: Path) -> tuple[int, str]:
    """What the folder's own script says, by the peft and transformers of this environment; nothing of Weft is there."""
    done = subprocess.run(
        [sys.executable, "-I", str(folder / "verify.py"), "--base", str(TINY_PATH)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["save_weights_for_sampler", "save_state", "save_weights_external"])
def test_a_download_loads_in_stock_peft(kind: str, checkpoints: dict[str, str], command: Weft, tmp_path: Path) -> None:
    done = command("download", checkpoints[kind], "--to", "adapter")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "adapter"
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "reference.json",
        "verify.py",
    ]
    code, said = verified(folder)
    assert (code, "OK" in said) == (0, True), said


def test_what_does_not_load_rightly_is_noticed(checkpoints: dict[str, str], command: Weft, tmp_path: Path) -> None:
    """Tinker's own layout, which PEFT loads as attention alone and without a word."""
    path = checkpoints["save_weights_for_sampler"]
    assert command("download", path, "--to", "adapter").returncode == 0
    assert command("verify", "adapter", "--base", str(TINY_PATH)).returncode == 0
    assert command("download", path, "--for", "tinker", "--to", "theirs").returncode == 0
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (tmp_path / "adapter" / name).write_bytes((tmp_path / "theirs" / name).read_bytes())
    code, said = verified(tmp_path / "adapter")
    assert (code, "WRONG" in said) == (1, True), said
    assert command("verify", "adapter", "--base", str(TINY_PATH)).returncode == 1


def test_what_cannot_be_tried_is_not_called_right(checkpoints: dict[str, str], command: Weft, tmp_path: Path) -> None:
    path = checkpoints["save_weights_for_sampler"]
    assert command("download", path, "--to", "adapter", "--no-reference").returncode == 0
    assert not (tmp_path / "adapter" / "reference.json").exists()
    code, said = verified(tmp_path / "adapter")
    assert (code, "reference.json" in said) == (2, True), said
    done = command("verify", "adapter")
    assert (done.returncode, "reference.json" in done.stderr) == (2, True), done.stderr


def test_an_unembedding_is_left_out_for_vllm_by_name(
    checkpoints: dict[str, str], command: Weft, tmp_path: Path
) -> None:
    path = checkpoints["save_weights_external"]
    refused = command("download", path, "--for", "vllm", "--to", "adapter")
    assert refused.returncode != 0
    assert "lm_head" in refused.stderr
    assert "--leave-out-unembedding" in refused.stderr
    assert not (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    assert command("download", path, "--for", "vllm", "--leave-out-unembedding", "--to", "adapter").returncode == 0
    folder = tmp_path / "adapter"
    kept = load_file(folder / "adapter_model.safetensors")
    assert not any("lm_head" in name for name in kept)
    assert any("experts.7.down_proj" in name for name in kept)
    assert "lm_head" not in json.loads((folder / "adapter_config.json").read_text())["target_modules"]
    assert "Left out: lm_head" in (folder / "README.md").read_text()


def test_a_readme_of_yours_is_left_alone(weftd: Weftd, checkpoints: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    with weft.RestClient(base_url=weftd.url, api_key=weftd.key("loom")) as rest:
        files = rest.download_checkpoint(checkpoints["save_state"], tmp_path).result(60)
    assert (tmp_path / "README.md").read_text() == "mine"
    assert sorted(path.name for path in files) == ["adapter_config.json", "adapter_model.safetensors", "verify.py"]
