"""A folder that `weft download` writes loads rightly in stock PEFT, and its `verify.py` tells whether it does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import weft
from click.testing import CliRunner, Result
from safetensors.numpy import load_file
from weft.cli import main

from tests.e2e.conftest import BASE_MODEL, Weftd
from tests.e2e.test_weft_sdk import client, train
from tests.forked import run_forked
from workers.model.tiny import TINY_PATH

pytestmark = pytest.mark.server

Weft = Callable[..., Result]


@pytest.fixture(scope="module")
def checkpoints(weftd: Weftd) -> dict[str, str]:
    """A trained adapter with all its parts, saved in each way: its path by the method that saved it."""
    with client(weftd) as service:
        run = service.create_lora_training_client(BASE_MODEL, rank=4, seed=5)
        train(run, 6)
        saves = (run.save_weights_for_sampler, run.save_state, run.save_weights_external)
        return {save.__name__: save("w").result(60).path for save in saves}


@pytest.fixture
def command(weftd: Weftd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Weft:
    """Run `weft` in this process: importing peft and transformers takes seconds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    environment = {"WEFT_BASE_URL": weftd.url, "WEFT_API_KEY": weftd.key("loom")}
    return lambda *arguments: CliRunner().invoke(main, arguments, env=environment)


#: Runs the verify.py of several folders, and prints how each ended and what it said.
ONE_BY_ONE = """
import io, json, runpy, sys
from contextlib import redirect_stderr, redirect_stdout
base, *folders = sys.argv[1:]
for folder in folders:
    sys.argv, said, code = [f"{folder}/verify.py", "--base", base], io.StringIO(), 0
    with redirect_stdout(said), redirect_stderr(said):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, said.getvalue()]))
"""


def verified(*folders: Path, alone: bool = False) -> list[tuple[int, str]]:
    """What each folder's own script says with this environment's peft and transformers. `alone`: in a new process,
    where Weft cannot be imported."""
    program = ("-c", ONE_BY_ONE, str(TINY_PATH), *map(str, folders))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if alone:
        command = [sys.executable, "-I", *program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    else:
        done = run_forked(*program, env=environment)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_a_download_loads_in_stock_peft(checkpoints: dict[str, str], command: Weft, tmp_path: Path) -> None:
    folders = [tmp_path / kind for kind in checkpoints]
    for folder in folders:
        done = command("download", checkpoints[folder.name], "--to", folder.name)
        assert done.exit_code == 0, done.output
        assert sorted(path.name for path in folder.iterdir()) == [
            "README.md",
            "adapter_config.json",
            "adapter_model.safetensors",
            "reference.json",
            "verify.py",
        ]
    found = verified(*folders, alone=True)
    assert [(code, "OK" in said) for code, said in found] == [(0, True)] * 3, found


def test_what_does_not_load_rightly_is_noticed(checkpoints: dict[str, str], command: Weft, tmp_path: Path) -> None:
    """Tinker's own layout: PEFT loads only its attention, without a warning."""
    path = checkpoints["save_weights_for_sampler"]
    assert command("download", path, "--to", "adapter").exit_code == 0
    assert command("verify", "adapter", "--base", str(TINY_PATH)).exit_code == 0
    done = command("verify", "adapter", "--base", "./nowhere")
    assert (done.exit_code, "there is no folder ./nowhere: " in done.stderr) == (2, True), done.stderr
    assert command("download", path, "--for", "tinker", "--to", "theirs").exit_code == 0
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (tmp_path / "adapter" / name).write_bytes((tmp_path / "theirs" / name).read_bytes())
    [(code, said)] = verified(tmp_path / "adapter")
    assert (code, "WRONG" in said) == (1, True), said
    assert command("verify", "adapter", "--base", str(TINY_PATH)).exit_code == 1


def test_what_cannot_be_tried_is_not_called_right(checkpoints: dict[str, str], command: Weft, tmp_path: Path) -> None:
    path = checkpoints["save_weights_for_sampler"]
    assert command("download", path, "--to", "adapter", "--no-reference").exit_code == 0
    assert not (tmp_path / "adapter" / "reference.json").exists()
    [(code, said)] = verified(tmp_path / "adapter")
    assert (code, "reference.json" in said) == (2, True), said
    done = command("verify", "adapter")
    assert (done.exit_code, "reference.json" in done.stderr) == (2, True), done.stderr


def test_an_unembedding_is_left_out_for_vllm_by_name(
    checkpoints: dict[str, str], command: Weft, tmp_path: Path
) -> None:
    path = checkpoints["save_weights_external"]
    refused = command("download", path, "--for", "vllm", "--to", "adapter")
    assert refused.exit_code != 0
    assert "lm_head" in refused.stderr
    assert "--leave-out-unembedding" in refused.stderr
    assert not (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    assert command("download", path, "--for", "vllm", "--leave-out-unembedding", "--to", "adapter").exit_code == 0
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


def held_by(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_what_is_refused_leaves_what_was_there(checkpoints: dict[str, str], command: Weft, tmp_path: Path) -> None:
    assert command("download", checkpoints["save_state"], "--to", "adapter").exit_code == 0
    before = held_by(tmp_path / "adapter")
    assert command("download", checkpoints["save_state"], "--for", "vllm", "--to", "adapter").exit_code != 0
    assert held_by(tmp_path / "adapter") == before


def test_a_reference_goes_with_its_adapter(checkpoints: dict[str, str], command: Weft, tmp_path: Path) -> None:
    """With another adapter, it would say that this one is loaded wrongly."""
    assert command("download", checkpoints["save_state"], "--to", "adapter").exit_code == 0
    assert (tmp_path / "adapter" / "reference.json").exists()
    assert command("download", checkpoints["save_state"], "--to", "adapter", "--no-reference").exit_code == 0
    assert not (tmp_path / "adapter" / "reference.json").exists()


#: `weft download`, killed when it writes a file to its final place for the n-th time.
KILLED = """
import os, signal, sys
import safetensors.numpy
from weft.cli import main

left = [int(sys.argv[1])]

def dying(write):
    def writes(*args, **options):
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return write(*args, **options)
    return writes

os.replace = dying(os.replace)
safetensors.numpy.save_file = dying(safetensors.numpy.save_file)
main(sys.argv[2:])
"""


def test_a_download_that_is_killed_leaves_no_adapter_that_loads_as_another(
    weftd: Weftd, checkpoints: dict[str, str], command: Weft, tmp_path: Path
) -> None:
    """vLLM loads an unembedding without an error but computes something else, so a folder for vLLM must never have one,
    not even for a moment."""
    options = ["--for", "vllm", "--leave-out-unembedding", "--to"]
    assert command("download", checkpoints["save_state"], *options, "whole").exit_code == 0
    whole, adapter = held_by(tmp_path / "whole"), ("adapter_config.json", "adapter_model.safetensors")
    environment = {**os.environ, "WEFT_BASE_URL": weftd.url, "WEFT_API_KEY": weftd.key("loom")}
    for writes in range(20):
        folder = f"after-{writes}"
        arguments = [str(writes), "download", checkpoints["save_state"], *options, folder]
        done = run_forked("-c", KILLED, *arguments, env=environment)
        found = held_by(tmp_path / folder)
        if "adapter_config.json" in found:  # without this file nobody would load the folder
            assert [found.get(name) for name in adapter] == [whole[name] for name in adapter], writes
        if done.returncode == 0:
            assert "adapter_config.json" in found
            return
    raise AssertionError("it never ended")
