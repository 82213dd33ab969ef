"""Engines to test: every engine that keeps the contract is made by a factory here, and runs test_engine_contract.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from workers.generator.engine import Engine, Finished, GenerateRequest
from workers.generator.torch_engine import TorchEngine
from workers.model.adapters.adapter import Adapter, save_adapter
from workers.model.adapters.shape import AdapterShape
from workers.model.base.weights import load_decoder
from workers.model.decoder import Decoder

EOS = (7, 11)
VOCAB = 97

#: Makes an engine; keyword arguments are those of TorchEngine (slots, context, ...).
EngineFactory = Callable[..., Engine]


@pytest.fixture(scope="session")
def reference() -> Qwen3MoeForCausalLM:
    """A random mixture-of-experts model whose next token is far from uniform."""
    config = Qwen3MoeConfig(
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
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
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="session")
def decoder(reference: Qwen3MoeForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("model")
    reference.save_pretrained(folder)
    return load_decoder(folder)


@pytest.fixture(scope="session")
def adapters(decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return four_adapters(decoder, tmp_path_factory)


def four_adapters(decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Four adapters that change the model a lot, of different ranks and targets: name -> folder."""
    kinds = [(4, True, True, True), (8, True, True, False), (2, False, True, False), (3, True, False, True)]
    folders: dict[str, Path] = {}
    for number, (rank, attn, mlp, unembed) in enumerate(kinds):
        shape = AdapterShape(decoder.config, rank, attn, mlp, unembed)
        adapter = Adapter.init(shape, seed=number, scale=2.0)
        generator = torch.Generator().manual_seed(100 + number)
        adapter.flat.add_(torch.randn(adapter.flat.shape, generator=generator), alpha=0.05)
        folder = tmp_path_factory.mktemp("adapters") / f"a{number}"
        save_adapter(adapter, folder, base_model="tiny")
        folders[f"a{number}"] = folder
    return folders


@pytest.fixture(params=["torch"])
def make_engine(request: pytest.FixtureRequest, decoder: Decoder) -> EngineFactory:
    def make(*, slots: int = 8, context: int = 96, **options: object) -> Engine:
        return TorchEngine(decoder, EOS, slots=slots, context=context, decode_text=spell, **options)  # type: ignore[arg-type]

    return make


def until_read(engine: Engine) -> None:
    """Wait for the adapters that are being read: the next step has them."""
    assert isinstance(engine, TorchEngine)
    while engine._adapters.reading:
        engine._adapters.wait(60)
        engine._install()


def spell(tokens: object, *, special: bool = True) -> str:
    """A tokenizer: token n is spelled <n>."""
    return "".join(f"<{token}>" for token in tokens)  # type: ignore[attr-defined]


def run(engine: Engine, *requests: GenerateRequest, max_steps: int = 2000) -> dict[str, Finished]:
    """Add `requests` and run until the engine is idle; returns everything that finishes."""
    for request in requests:
        engine.add(request)
    finished: dict[str, Finished] = {}
    for _ in range(max_steps):
        if not engine.busy:
            return finished
        for result in engine.step():
            assert result.id not in finished
            finished[result.id] = result
    raise AssertionError(f"still busy after {max_steps} steps: {engine.stats()}")
