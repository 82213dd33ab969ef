"""Checkpoints, by the official SDK and command line on a real server: resumed, exported, copied, managed."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyrage
import pytest
import tinker
import torch
from safetensors.torch import load_file, save_file
from tinker import types
from transformers import AutoModelForCausalLM

from tests.e2e.conftest import BASE_MODEL, Weftd, tinker_command
from tests.e2e.data import prompt, supervised
from tests.e2e.test_official_sdk import losses, weights_of
from workers.model.tiny import TINY_PATH

pytestmark = pytest.mark.server
Official = Callable[..., Any]
GREEDY = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[])


@pytest.fixture
def rest(weftd: Weftd) -> Any:
    return tinker.RestClient(base_url=weftd.url, api_key=weftd.key())


@pytest.fixture
def cli(weftd: Weftd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run the official command line; returns the JSON that it prints."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, fails: bool = False) -> Any:
        done = tinker_command(weftd, "-f", "json", *arguments)
        assert (done.returncode != 0) == fails, done.stderr
        return json.loads(done.stdout) if done.stdout.strip().startswith(("{", "[")) else done.stdout + done.stderr

    return run


class TestExactResume:
    def test_loading_and_going_on_is_never_having_stopped(self, official: Official, rest: Any) -> None:
        service = official()
        run = service.create_lora_training_client(BASE_MODEL, rank=8, seed=5).result()
        losses(run, 2)
        run.forward_backward(supervised(seed=9), "cross_entropy").result()  # accumulated, so no part of what is saved
        path = run.save_state("resume").result().path
        straight = service.create_lora_training_client(BASE_MODEL, rank=8, seed=5).result()
        losses(straight, 2)
        expected = losses(straight, 3, seed=1), weights_of(straight)
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        run.load_state_with_optimizer(path).result()
        copied = rest.copy_weights(path, "archive").result()
        copied = service.create_training_client_from_state_with_optimizer(copied).result()
        for continued in (resumed, run, copied):
            found = losses(continued, 3, seed=1), weights_of(continued)
            assert found[0] == expected[0]
            assert (found[1] == expected[1]).all()
        fresh = service.create_training_client_from_state(path).result()
        assert losses(fresh, 3, seed=1)[0] == expected[0][0]
        assert (weights_of(fresh) != expected[1]).any()

    def test_an_export_comes_back_with_the_same_weights(self, official: Official) -> None:
        service = official()
        run = service.create_lora_training_client(BASE_MODEL, rank=6).result()
        losses(run, 2)
        path = run.save_weights_external("out").result().path
        again = service.create_training_client_from_state(path).result()
        assert (weights_of(again) == weights_of(run)).all()


class TestExternalWeights:
    def test_transformers_computes_the_same_from_the_files(self, official: Official, rest: Any, tmp_path: Path) -> None:
        run = official().create_lora_training_client(BASE_MODEL, rank=8).result()
        losses(run, 3)
        path = run.save_weights_external("final", ttl_seconds=3600).result().path
        assert path.endswith("/external_weights/final")
        reply = rest.get_external_weights_urls(path).result()
        assert reply.expires > datetime.now(UTC) + timedelta(minutes=30)
        for name, url in reply.urls.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            urllib.request.urlretrieve(url, tmp_path / name)
        model = merged(tmp_path)
        theirs = []
        for datum in supervised(seed=99):
            tokens = datum.model_input.to_ints()
            with torch.no_grad():
                logprobs = torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1)
            targets = datum.loss_fn_inputs["target_tokens"].to_torch().long()
            theirs.append(logprobs.gather(1, targets[:, None])[:, 0].numpy())
        assert np.abs(np.concatenate(theirs) - weights_of(run)).max() < 1e-4

    def test_encrypted_files_are_for_their_recipients(self, official: Official, rest: Any) -> None:
        identity = pyrage.x25519.Identity.generate()
        run = official().create_lora_training_client(BASE_MODEL, rank=4).result()
        path = run.save_weights_external("secret", age_encryption_recipients=[str(identity.to_public())]).result().path
        urls = rest.get_external_weights_urls(path).result().urls
        assert all(name.endswith(".age") for name in urls)
        with urllib.request.urlopen(urls["adapter_config.json.age"]) as reply:
            assert json.loads(pyrage.decrypt(reply.read(), [identity]))["r"] == 4
        with pytest.raises(tinker.RequestFailedError, match="encrypted"):
            official().create_training_client_from_state(path).result()

    def test_a_name_is_taken_once(self, official: Official) -> None:
        run = official().create_lora_training_client(BASE_MODEL, rank=4).result()
        run.save_weights_external("twice").result()
        with pytest.raises(tinker.RequestFailedError, match="exists already"):
            run.save_weights_external("twice").result()
        run.save_state("after").result()


def merged(export: Path) -> Any:
    """The base model with an export's files for each expert added to its weights, by nothing but their names."""
    factors = load_file(export / "peft" / "adapter_model.safetensors")
    config = json.loads((export / "peft" / "adapter_config.json").read_text())
    folder = export / "merged"
    base = AutoModelForCausalLM.from_pretrained(TINY_PATH, dtype=torch.float32)
    base.save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    for key, a in factors.items():
        if ".lora_A." in key:
            name = key.removeprefix("base_model.model.").replace(".lora_A", "")
            b = factors[key.replace("lora_A", "lora_B")]
            weights[name] = weights[name] + config["lora_alpha"] / config["r"] * (b @ a)
    save_file(weights, file, {"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


class TestSharing:
    def test_published_weights_are_loaded_and_sampled_by_others(self, official: Official, rest: Any) -> None:
        run = official().create_lora_training_client(BASE_MODEL, rank=4).result()
        losses(run, 3)
        path, sampler_path = run.save_state("s").result().path, run.save_weights_for_sampler("w").result().path
        mine = official().create_sampling_client(model_path=sampler_path).result()
        expected = mine.sample(prompt(), 1, GREEDY).result().sequences[0].tokens
        other = official("rival")
        with pytest.raises(tinker.NotFoundError):
            other.create_sampling_client(model_path=sampler_path).result()
        for published in (path, sampler_path):
            rest.publish_checkpoint_from_tinker_path(published).result()
        theirs = other.create_sampling_client(model_path=sampler_path).result()
        assert theirs.sample(prompt(), 1, GREEDY).result().sequences[0].tokens == expected
        loaded = other.create_training_client_from_state(path).result()
        assert (weights_of(loaded) == weights_of(run)).all()
        losses(loaded, 1)

    def test_a_copied_sampler_outlives_its_source(self, official: Official, rest: Any) -> None:
        run = official().create_lora_training_client(BASE_MODEL, rank=4).result()
        losses(run, 2)
        path = run.save_weights_for_sampler("w", ttl_seconds=3600).result().path
        client = official().create_sampling_client(model_path=path).result()
        expected = client.sample(prompt(), 1, GREEDY).result().sequences[0].tokens
        copied = rest.copy_weights(path, "archive").result()
        rest.delete_checkpoint_from_tinker_path(path).result()
        again = official().create_sampling_client(model_path=copied).result()
        assert again.sample(prompt(), 1, GREEDY).result().sequences[0].tokens == expected


class TestCommandLine:
    def test_a_checkpoint_is_managed(self, official: Official, cli: Any) -> None:
        run = official().create_lora_training_client(BASE_MODEL, rank=4).result()
        path = run.save_state("kept", user_metadata={"step": "7"}).result().path
        run_id = path.removeprefix("tinker://").split("/")[0]
        (listed,) = cli("checkpoint", "list", "--run-id", run_id)["checkpoints"]
        assert (listed["tinker_path"], listed["checkpoint_type"]) == (path, "training")
        assert cli("checkpoint", "list", "--limit", "0")["checkpoints"]
        assert path in json.dumps(cli("checkpoint", "info", path))
        cli("checkpoint", "publish", path)
        assert cli("checkpoint", "list", "--run-id", run_id)["checkpoints"][0]["public"]
        cli("checkpoint", "unpublish", path)
        cli("checkpoint", "set-ttl", path, "--ttl", "7200")
        assert cli("checkpoint", "list", "--run-id", run_id)["checkpoints"][0]["expires_at"]
        cli("checkpoint", "set-ttl", path, "--remove")
        assert not cli("checkpoint", "list", "--run-id", run_id)["checkpoints"][0]["expires_at"]
        cli("checkpoint", "delete", "--yes", path)
        assert cli("checkpoint", "list", "--run-id", run_id)["checkpoints"] == []

    def test_checkpoints_are_downloaded(self, official: Official, rest: Any, cli: Any, tmp_path: Path) -> None:
        run = official().create_lora_training_client(BASE_MODEL, rank=4).result()
        losses(run, 1)
        paths = [run.save_state("state").result().path, run.save_weights_external("ext").result().path]
        files = []
        for path in paths:
            cli("checkpoint", "download", path, "--output", "out")
            folder = tmp_path / "out" / path.removeprefix("tinker://").replace("/", "_")
            files.append({f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()})
        assert files[0] == files[1]
        assert {"adapter_config.json", "adapter_model.safetensors", "peft/adapter_model.safetensors"} <= set(files[0])
        names = [c.checkpoint_id for c in rest.list_user_checkpoints(limit=1000).result().checkpoints]
        assert "external_weights/download" not in names
        run.save_weights_for_sampler("s").result()
        cli("checkpoint", "download", paths[0].replace("weights/state", "sampler_weights/s"), fails=True)


def test_older_clients_resume_and_fetch_archives(official: Official, weftd: Weftd, tmp_path: Path) -> None:
    """The calls of SDKs up to 0.37: weights_info, create_model and load_weights in place; an archive by redirect."""
    service = official()
    run = service.create_lora_training_client(BASE_MODEL, rank=8).result()
    losses(run, 2)
    path = run.save_state("old").result().path
    expected = losses(run, 2, seed=1)
    http = httpx.Client(base_url=f"{weftd.url}/api/v1", headers={"x-api-key": weftd.key()})
    info = http.post("weights_info", json={"tinker_path": path}).json()
    again = service.create_lora_training_client(
        info["base_model"],
        rank=info["lora_rank"],
        train_mlp=info["train_mlp"],
        train_attn=info["train_attn"],
        train_unembed=info["train_unembed"],
    ).result()
    again.load_state_with_optimizer(path).result()
    assert losses(again, 2, seed=1) == expected
    run_id, kind, name = path.removeprefix("tinker://").split("/")
    reply = http.get(f"training_runs/{run_id}/checkpoints/{kind}/{name}/archive")
    assert reply.status_code == 302
    urllib.request.urlretrieve(reply.headers["location"], tmp_path / "checkpoint.tar")
    subprocess.run(["tar", "xf", "checkpoint.tar"], cwd=tmp_path, check=True)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 8
    assert (tmp_path / "checkpoint_complete").exists()
