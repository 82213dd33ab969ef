"""The engine where the base is in bfloat16, and on a GPU: it samples what the trainer's forward finds likely, which is
computed on the CPU, with the experts that the engine's routers chose: where two experts are nearly as good, rounding
decides between them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from tests.workers.generator.conftest import EOS, run
from workers.generator.engine import GenerateRequest, SamplingParams
from workers.generator.torch_engine import TorchEngine
from workers.model.adapters.adapter import load_adapter
from workers.model.attend import PackedAttend
from workers.model.base.weights import load_decoder
from workers.model.decoder import Decoder
from workers.model.logprobs import target_logprobs
from workers.model.lora.rows import LoraRows

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

#: Device, dtype of the base, and how far log-probabilities may differ.
TARGETS = [
    pytest.param("cpu", torch.bfloat16, 0.1, id="cpu-bfloat16"),
    pytest.param("cuda", torch.float32, 5e-3, id="cuda-float32", marks=on_gpu),
    pytest.param("cuda", torch.bfloat16, 0.1, id="cuda-bfloat16", marks=on_gpu),
]


def scored(decoder: Decoder, tokens: list[int], folder: Path | None, routes_TMC: np.ndarray) -> np.ndarray:
    """Log-probabilities of tokens[1:] by the training forward, with these experts."""
    adapter = load_adapter(folder, decoder.config).adapter if folder else None
    rows = LoraRows([0, len(tokens) - 1], [adapter])
    inputs = torch.tensor(tokens)
    every, routes_MTC = torch.arange(len(tokens) - 1), torch.from_numpy(routes_TMC).transpose(0, 1).contiguous()
    with torch.no_grad():
        hidden = decoder(inputs[:-1], every, PackedAttend([len(tokens) - 1]), rows, None, routes_MTC)
        return target_logprobs(decoder, hidden, every, inputs[1:], rows).numpy()


@pytest.mark.parametrize(("device", "dtype", "tolerance"), TARGETS)
def test_sampler_and_trainer_agree(
    reference: Qwen3MoeForCausalLM,
    adapters: dict[str, Path],
    tmp_path: Path,
    device: str,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    reference.save_pretrained(tmp_path)
    engine = TorchEngine(load_decoder(tmp_path, dtype, device), EOS, slots=6, context=160)
    on_cpu = load_decoder(tmp_path, dtype, "cpu")
    names = ["", *adapters]
    prompts = {name: tuple(range(3, 8 + 20 * i)) for i, name in enumerate(names)}
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=8)
    requests = [
        GenerateRequest(
            f"r{i}",
            prompts[name],
            sampling if i % 2 else SamplingParams(max_tokens=12, temperature=1.0, top_k=20, top_p=0.9, seed=9),
            num_samples=2,
            adapter=name,
            adapter_folder=adapters.get(name),
            prompt_logprobs=True,
            topk_sample_logprobs=2,
            return_routed_experts=True,
        )
        for i, name in enumerate(names)
    ]
    finished = run(engine, *requests)
    for request in requests:
        result = finished[request.id]
        assert result.error is None, result.error
        for sequence in result.sequences:
            tokens = [*request.prompt, *sequence.tokens.tolist()]
            assert sequence.routed_experts is not None
            wanted = scored(on_cpu, tokens, request.adapter_folder, sequence.routed_experts)
            np.testing.assert_allclose(sequence.logprobs, wanted[len(request.prompt) - 1 :], atol=tolerance)
            assert result.prompt_logprobs is not None
            np.testing.assert_allclose(result.prompt_logprobs[1:], wanted[: len(request.prompt) - 1], atol=tolerance)
