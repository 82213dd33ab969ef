"""What bench/parts/gpu_decode.py counts, and its steps at a tiny size: on the CPU in Triton's interpreter."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu
from bench.parts.toy import random_decoder
from tests.workers.model.gpu_kit import DEVICE
from workers.model.adapters.adapter import Adapter
from workers.model.adapters.shape import AdapterShape
from workers.model.lora import products as lora_products


@pytest.fixture
def gpu_decode() -> Any:
    """The module, imported late: first DEVICE's module must set Triton to interpret kernels."""
    return importlib.import_module("bench.parts.gpu_decode")


def test_what_a_step_must_read(gpu_decode: Any) -> None:
    """Of Qwen3-30B-A3B one row reads the active parameters, very many rows read all; each position 96 KiB of cache."""
    config = gpu.SHAPES["qwen3-30b-a3b"]
    embedding = config.vocab_size * config.hidden_size
    assert gpu_decode.bytes_read(config, 1, 0, 2) / 2 == pytest.approx(3.35e9 - embedding, rel=0.01)
    assert gpu_decode.bytes_read(config, 10**6, 0, 2) / 2 == pytest.approx(30.5e9 - embedding, rel=0.01)
    more = gpu_decode.bytes_read(config, 3, 100, 2) - gpu_decode.bytes_read(config, 3, 0, 2)
    assert more == pytest.approx(3 * 100 * 96 * 1024)


def test_steps_of_the_tiny_shape(gpu_decode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_products, "on_device", lambda weight: True)
    with torch.inference_mode():
        decoder = random_decoder(gpu.SHAPES["tiny"], DEVICE, torch.float32)
        adapters = [Adapter.init(AdapterShape(decoder.config, 4), seed, device=DEVICE) for seed in range(2)]
        for adapter in adapters:
            adapter.flat.normal_(0.0, 0.3)
        batch = gpu_decode.Batch.of(decoder, rows=3, length=40)
        found = {name: work()[0] for name, work in gpu_decode.variants(batch, adapters, graphs=False).items()}
    assert list(found) == ["base, pieces", "one adapter, pieces", "adapters, pieces"]
    assert all(logits.shape == (3, 64) and logits.isfinite().all() for logits in found.values())
    base, one, both = found.values()
    assert not torch.allclose(base, one)
    assert torch.allclose(one[0], both[0], atol=1e-4)
    assert not torch.allclose(one[1], both[1], atol=1e-4)


def test_report(gpu_decode: Any) -> None:
    with torch.inference_mode():
        batch = gpu_decode.Batch.of(random_decoder(gpu.SHAPES["tiny"], DEVICE, torch.float32), rows=4, length=32)
    base, adapted = gpu_decode.report(batch, {"base, replayed": 0.5, "adapters, replayed": 0.625}, 10, 3)
    assert (base["ms_per_step"], base["tokens_per_s"], base["limit"], base["distinct"]) == (50.0, 80.0, 1.0, 0)
    assert (adapted["limit"], adapted["distinct"]) == (0.8, 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_it_runs_on_a_gpu(tmp_path: Path) -> None:
    file = tmp_path / "gpu_decode.json"
    flags = ["--decode", "--shape", "tiny", "--rows", "1", "5", "--length", "64", "--ranks", "4", "--rounds", "1"]
    assert gpu.main([*flags, "--out", str(file)]) == 0
    assert '"ms_per_step"' in file.read_text()
