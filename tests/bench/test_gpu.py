"""What bench/gpu.py counts and computes, and its model at a tiny size on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import gpu
from bench.parts.gpu_measure import distinct_adapters, seconds_of
from bench.parts.toy import random_decoder
from workers.model.adapters.adapter import Adapter
from workers.model.adapters.shape import AdapterShape


def test_parameters_of_the_published_shape() -> None:
    """Flops are counted from parameters: 30.5 billion, of which 3.3 are active without the embedding, and those of MLP
    adapters as published."""
    config = gpu.SHAPES["qwen3-30b-a3b"]
    base = gpu.Flops.per_token(config, 1, 0).base / 4
    assert base == pytest.approx(3.35e9 - config.vocab_size * config.hidden_size, rel=0.01)
    low = gpu.Flops.per_token(config, 1, 0).adapters / 6
    attn = config.num_layers * (3 * 2048 + 4096 + 2 * 512 + 4096 + 2048)
    active_mlp = config.num_layers * (3 * 2048 + 8 * 3 * 768)
    assert low == attn + active_mlp + 2048 + 151_936


def test_attention_is_counted_by_half_of_the_sequence() -> None:
    config = gpu.SHAPES["tiny"]
    more = gpu.Flops.per_token(config, 8, 100).base - gpu.Flops.per_token(config, 8, 0).base
    products = 2 + 4  # forward, backward
    assert more == config.num_layers * products * 2 * config.q_size * (100 / 2)


def test_tokens_are_shared_evenly() -> None:
    assert gpu.lengths_of(20, 2, 8) == [[8, 2], [8, 2]]
    assert gpu.lengths_of(10, 3, 8) == [[3], [3], [4]]


def test_adapters_that_fit() -> None:
    assert distinct_adapters(64, 10, 1000, reserve_bytes=200) == 40
    assert distinct_adapters(8, 10, 1000, reserve_bytes=200) == 8
    assert distinct_adapters(8, 10, 100, reserve_bytes=200) == 1


def test_report() -> None:
    assert gpu.report(0.5, 1000, 1e9, peak_tflops=10) == {
        "seconds": 0.5,
        "tokens_per_s": 2000.0,
        "model_flop_utilisation": 0.2,
    }


def test_a_step_of_the_tiny_shape() -> None:
    cpu = torch.device("cpu")
    decoder = random_decoder(gpu.SHAPES["tiny"], cpu, torch.float32)
    shape = AdapterShape(decoder.config, 4)
    adapters = [Adapter.init(shape, seed) for seed in range(2)]
    grads = [Adapter.zeros(shape) for _ in adapters]
    gpu.Pass.of(decoder, gpu.lengths_of(30, 3, 8), adapters, grads).step()
    assert all(grad.flat.any() for grad in grads)
    gpu.base_step(decoder, gpu.lengths_of(30, 1, 8))()
    assert not decoder.embed.requires_grad
    assert decoder.embed.grad is None


def test_rounds_are_interleaved_and_the_first_is_not_counted() -> None:
    calls: list[str] = []
    works = {name: (lambda name=name: calls.append(name)) for name in ("a", "b")}
    assert set(seconds_of(works, 2, lambda: None)) == {"a", "b"}
    assert calls == ["a", "b"] * 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_it_runs_on_a_gpu(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    flags = ["--shape", "tiny", "--tenants", "1", "3", "--ranks", "4", "--tokens", "64", "--rounds", "1"]
    assert gpu.main([*flags, "--out", str(file)]) == 0
    assert '"tokens_per_s"' in file.read_text()
