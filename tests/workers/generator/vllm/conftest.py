"""A real vLLM for the CPU, where `make vllm` has been run: one server for all tests, and engines that talk to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from workers.generator.vllm.adapters import LoraLimits, targets
from workers.generator.vllm.engine import VllmEngine
from workers.generator.vllm.server import Launch
from workers.model.adapters.adapter import Adapter, save_adapter
from workers.model.adapters.shape import AdapterShape
from workers.model.families.read import read_config
from workers.model.tiny import TINY_PATH

ROOT = Path(__file__).resolve().parents[4]
PROGRAM = ROOT / ".vllm" / "bin" / "vllm"
LIMITS = LoraLimits(max_adapters=8, max_rank=8)
CONTEXT = 256
EOS = (1533,)


@pytest.fixture(scope="session")
def vllm_program() -> Path:
    if not (ROOT / ".vllm" / ".setup-done").is_file():
        pytest.skip("there is no vLLM here (make vllm)")
    return PROGRAM


def launch(program: Path, model: Path) -> Launch:
    config = read_config("tiny", model)
    threads = max(1, (os.cpu_count() or 2) // 2)
    return Launch(program, model, targets(config), context=CONTEXT, slots=64, limits=LIMITS, threads=threads)


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Four adapters that vLLM can serve and that change the model a lot: name -> folder."""
    config = read_config("tiny", TINY_PATH)
    folders: dict[str, Path] = {}
    for number, (rank, attn, mlp) in enumerate([(4, True, True), (8, True, True), (2, False, True), (3, True, False)]):
        adapter = Adapter.init(AdapterShape(config, rank, attn, mlp, False), seed=number, scale=2.0)
        generator = torch.Generator().manual_seed(100 + number)
        adapter.flat.add_(torch.randn(adapter.flat.shape, generator=generator), alpha=0.05)
        folder = tmp_path_factory.mktemp("vllm-adapters") / f"a{number}"
        save_adapter(adapter, folder, base_model="tiny", details={"step": number})
        folders[f"a{number}"] = folder
    return folders


@pytest.fixture(scope="session")
def engine(vllm_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """The engine that has started the server, of the model that comes with Weft."""
    engine = VllmEngine(
        read_config("tiny", TINY_PATH),
        EOS,
        slots=64,
        context=CONTEXT,
        limits=LIMITS,
        folder=tmp_path_factory.mktemp("vllm") / "adapters",
        launch=launch(vllm_program, TINY_PATH),
    )
    try:
        engine.wait_ready(280)
        yield engine
    finally:
        engine.close()


#: Makes an engine on the one server; keyword arguments are those of TorchEngine that mean something here.
MakeEngine = Callable[..., VllmEngine]
