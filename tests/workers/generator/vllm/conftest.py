"""A real vLLM for the CPU, where `make vllm` has been run: one server for all tests, and engines that talk to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.workers.generator.conftest import VOCAB
from workers.generator.vllm.adapters import Room, targets
from workers.generator.vllm.engine import VllmEngine
from workers.generator.vllm.server import Launch
from workers.model.adapter import Adapter, AdapterShape, save_adapter
from workers.model.config import read_config

ROOT = Path(__file__).resolve().parents[4]
PROGRAM = ROOT / ".vllm" / "bin" / "vllm"
ROOM = Room(slots=8, rank=8)


@pytest.fixture(scope="session")
def vllm_program() -> Path:
    if not (ROOT / ".vllm" / ".setup-done").is_file():
        pytest.skip("there is no vLLM here (make vllm)")
    return PROGRAM


@pytest.fixture(scope="session")
def reference() -> Qwen3MoeForCausalLM:
    """As the other engines', in sizes that vLLM's kernel for experts takes: multiples of 32."""
    config = Qwen3MoeConfig(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        intermediate_size=64,
        vocab_size=VOCAB,
        norm_topk_prob=True,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    torch.manual_seed(3)
    model = Qwen3MoeForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


def launch(program: Path, model: Path, **options: object) -> Launch:
    config = read_config("test", model)
    fields = {"targets": targets(config), "context": 200, "slots": 64, "room": ROOM, **options}
    return Launch(program, model, **fields)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def model_folder(reference: Qwen3MoeForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm-model")
    reference.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def adapters(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Four adapters that vLLM can serve and that change the model a lot: name -> folder."""
    config = read_config("test", model_folder)
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
def vllm_engine(
    vllm_program: Path, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmEngine]:
    """The engine that has started the server."""
    engine = VllmEngine(
        read_config("test", model_folder),
        (),
        slots=64,
        context=200,
        room=ROOM,
        folder=tmp_path_factory.mktemp("vllm") / "adapters",
        launch=launch(vllm_program, model_folder, threads=os.cpu_count() or 1),
    )
    try:
        engine.wait_ready(300)
        yield engine
    finally:
        engine.close()


#: Makes an engine on the one server; keyword arguments are those of TorchEngine that mean something here.
MakeEngine = Callable[..., VllmEngine]
