"""Repeated work is captured the second time; on a GPU, in CUDA graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.generator.conftest import EOS, run
from tests.workers.model import gpu_kit
from workers.generator.engine import GenerateRequest, SamplingParams
from workers.generator.gpu.capture import CudaGraphs, NeverWaits, Repeated
from workers.generator.gpu.steps import DecodeSteps
from workers.generator.torch_engine import TorchEngine
from workers.model.adapters.adapter import save_adapter
from workers.model.config import DecoderConfig
from workers.model.decoder import Decoder

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

#: Widths that the grouped kernel takes.
CONFIG = DecoderConfig(
    **{**gpu_kit.CONFIG.__dict__, "hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 32, "num_layers": 2}
)
SLOTS, CONTEXT = 8, 96


def test_first_as_it_is_then_captured_then_replayed() -> None:
    done: list[str] = []

    def capture(function: Callable[[], int]) -> tuple[Callable[[], None], int]:
        done.append("captured")
        return lambda: done.append("replayed"), function()

    def function() -> int:
        done.append("run")
        return 7

    repeated = Repeated(function, capture)
    assert [repeated() for _ in range(4)] == [7] * 4
    assert done == ["run", "captured", "run", "replayed", "replayed", "replayed"]


def test_what_cannot_be_captured_goes_on_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def capture(function: Callable[[], int]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    repeated = Repeated(lambda: 7, capture)
    assert [repeated() for _ in range(4)] == [7] * 4
    assert caplog.text.count("cannot be captured") == 1


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x * x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.unique(),
        lambda x: x if torch.equal(x, x) else x + 1,
        lambda x: x.to("meta"),
    ],
)
def test_what_waits_for_the_device_is_not_captured(waits: Callable[[torch.Tensor], Any], patch_graphs: None) -> None:
    """It fails earlier, in a rehearsal, and only there: other threads may wait as they like."""
    x, other = torch.ones(4), list[float]()
    repeated = Repeated(lambda: waits(x), CudaGraphs[Any]())
    for _ in range(3):
        repeated()
    assert repeated._capture is None
    with NeverWaits():
        beside = threading.Thread(target=lambda: other.append(x.sum().item()))
        beside.start()
        beside.join()
        with pytest.raises(RuntimeError, match="waits for the device"):
            waits(x)
    assert other == [4.0]
    with NeverWaits():
        assert (x * 2).index_select(0, torch.tensor([1])).shape == (1,)


@pytest.fixture
def patch_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
def test_after_one_that_waits_others_are_captured(device: str) -> None:
    graphs, x = CudaGraphs[torch.Tensor](), torch.ones(1 << 20, device=device)
    waiting = Repeated(lambda: x * x.sum().item(), graphs)
    plain = Repeated(lambda: x * 2, graphs)
    for _ in range(3):
        assert waiting()[0].item() == 1 << 20
        assert plain()[0].item() == 2
    assert waiting._captured is None
    assert plain._captured is not None
    held = torch.cuda.memory_allocated()
    torch.empty(1 << 20, device=device)
    assert torch.cuda.memory_allocated() == held, "what is given back is given back outside of graphs"


class Counted(CudaGraphs[Any]):
    captured = 0

    def __call__(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.captured += 1
        return super().__call__(function)


def decoder(device: str) -> Decoder:
    made, generator = Decoder(CONFIG, torch.bfloat16, device), torch.Generator().manual_seed(7)
    for weight in made.parameters():
        std = 1.0 if weight.ndim == 1 else 1.5 / weight.shape[-1] ** 0.5
        weight.data.copy_(std * torch.randn(weight.shape, generator=generator))
    return made


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
def test_graphs_decode_as_what_they_captured(device: str, tmp_path: Path) -> None:
    """Running sets that change, with adapters of three ranks: replayed, and launched piece by piece."""
    for seed, rank in enumerate((4, 8, 20)):
        save_adapter(gpu_kit.adapter(CONFIG, rank, seed), tmp_path / str(seed), base_model="tiny")
    requests = [
        GenerateRequest(
            f"r{i}",
            tuple(3 + (7 * i + j) % 60 for j in range(29 + i % 4)),
            SamplingParams(max_tokens=4 + 3 * i, temperature=0.7, seed=i),
            num_samples=1 + i % 2,
            adapter=str(i % 4) if i % 4 < 3 else "",
            adapter_folder=tmp_path / str(i % 4) if i % 4 < 3 else None,
            return_routed_experts=True,
        )
        for i in range(10)
    ]
    captures = [None, Counted()]
    found = []
    for capture in captures:
        engine = TorchEngine(decoder(device), EOS, slots=SLOTS, context=CONTEXT)
        engine._decoding.launch = DecodeSteps(
            engine._decoder, engine._cache, slots=SLOTS, context=CONTEXT, capture=capture
        )
        if capture is None:
            engine._decoding.ahead = None  # each step waits for the one before
        found.append(run(engine, *requests))
    assert captures[1] is not None
    assert captures[1].captured > 2
    for request in requests:
        pieces, replayed = (results[request.id] for results in found)
        assert replayed.error is None, replayed.error
        for one, other in zip(pieces.sequences, replayed.sequences, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            np.testing.assert_allclose(other.logprobs, one.logprobs, atol=1e-4)
            np.testing.assert_array_equal(one.routed_experts, other.routed_experts)
