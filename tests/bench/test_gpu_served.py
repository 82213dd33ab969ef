"""bench/gpu_served.py at a tiny size, with all processes that it starts; and the model folders that it serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench import gpu, gpu_served
from bench.parts import gpu_measure
from bench.parts.published import size_of, write_folder
from workers.model.attend import PackedAttend
from workers.model.base.weights import load_decoder
from workers.model.card import read_card
from workers.model.logprobs import target_logprobs
from workers.model.planning.plan import Device, Part, Plan

ROOT = Path(__file__).parents[2]
TINY = gpu.SHAPES["tiny"]


def test_other_libraries_read_the_folder_as_we_do(tmp_path: Path) -> None:
    written = write_folder(tmp_path, TINY, "cpu")
    assert written == size_of(TINY) == 2 * AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters()
    card = read_card("tiny", tmp_path)
    assert card.config == TINY
    assert card.eos_token_ids == ()  # no token ends a sample before its limit
    assert AutoTokenizer.from_pretrained(tmp_path).encode("a b")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens_T = torch.arange(20) * 3 % TINY.vocab_size
    with torch.inference_mode():
        wanted_TV = theirs(tokens_T[None]).logits[0].log_softmax(-1)
        decoder = load_decoder(tmp_path)
        hidden_TD = decoder(tokens_T, torch.arange(20), PackedAttend([20]))
        found_T = target_logprobs(decoder, hidden_TD, torch.arange(20), tokens_T.roll(-1))
    torch.testing.assert_close(found_T, wanted_TV[torch.arange(20), tokens_T.roll(-1)], rtol=0, atol=1e-5)
    assert wanted_TV.std() > 0.05  # so the comparison is not of equal numbers


def test_the_size_is_that_of_the_published_model() -> None:
    """The model card of Qwen3-30B-A3B says 30.5 billion parameters."""
    assert size_of(gpu.SHAPES["qwen3-30b-a3b"]) / 2 == pytest.approx(30.5e9, rel=0.005)


@pytest.mark.parametrize(("used_gib", "copies", "holds"), [(33, 1.0, True), (53, 2.0, False)])
def test_copies_of_the_base_are_counted_from_memory_beyond_the_plan(
    tmp_path: Path, used_gib: int, copies: float, holds: bool
) -> None:
    """One copy of 16 layers takes 20 GiB. 10 are planned for keys and values, 2 for processes; 1 was used before."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        '#!/bin/sh\ncase $1 in *compute-apps*) echo "$$, 512"; echo "1, [N/A]";; '
        f"*memory.used*) echo {used_gib << 10};; *) echo NVIDIA H200;; esac\n"
    )
    smi.chmod(0o755)
    device = gpu_measure.Device(139 << 30, str(smi))
    assert device.name == "NVIDIA H200"
    assert [each["used_mib"] for each in device.processes()] == ["512", "[N/A]"]
    args = gpu_served._arguments(["--out", str(tmp_path / "out.json")])
    args.began = 0.0
    config = replace(gpu.SHAPES["qwen3-30b-a3b"], num_layers=16)
    sizes = {"keys and values": 10, "processes and libraries": 2, "runs in training": 29, "weights": 20}
    parts = [Part(name, size << 30) for name, size in sizes.items()]
    plan = Plan(Device("cuda:0", 139 << 30), parts, Part("paged", 0), 64, 1, 1, 1, 2048, False, True, True)
    bench = gpu_served.Bench(args, config, device, {"claims": []})
    bench.start(1.0, plan, before_bytes=1 << 30)
    (claim,) = json.loads((tmp_path / "out.json").read_text())["claims"]
    assert claim["value"] == pytest.approx(copies, abs=0.05)
    assert claim["holds"] is holds


@pytest.mark.server
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the bench itself is for it")
def test_it_trains_samples_and_survives_a_kill(tmp_path: Path) -> None:
    out, folder = tmp_path / "served.json", tmp_path / "model"
    command = [sys.executable, "bench/gpu_served.py", "--shape", "tiny", "--folder", folder, "--out", out]
    command += ["--tenants", "2", "--rank", "4", "--steps", "2", "--new", "8", "--seconds", "0.1"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'client_sdk'}", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert len(found["training"]["losses"]) == 2
    assert found["agreement"]["differences"]["tokens"] == 2 * 8 * 8
    assert set(found["rates"]["both at once"]) == {"trained", "sampled"}
    assert found["claims"]
    assert all(claim["holds"] for claim in found["claims"])
    assert not list(tmp_path.glob("weft-bench-*"))
    assert not folder.exists()
