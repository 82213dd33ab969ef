"""The families whose adapters vLLM serves: its log-probabilities beside TorchEngine's, of a tiny model of each and with
adapters on attention, on the MLP, and on both. A start of vLLM each, so `make soak` runs these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.workers.generator.conftest import run
from tests.workers.model.models import FAMILIES, ours, random_adapter, reference
from workers.generator.engine import Finished, GenerateRequest, SamplingParams
from workers.generator.torch_engine import TorchEngine
from workers.generator.vllm import adapters
from workers.generator.vllm.engine import VllmEngine
from workers.model.adapters.adapter import save_adapter
from workers.model.decoder import Decoder

from .conftest import CONTEXT, LIMITS, launch
from .test_contract import finish

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(600)]

#: What published models have and the tiny ones of other tests do not: a size of heads for which vLLM's CPU build has a
#: kernel (of latent attention: DeepSeek's own), and fields that vLLM reads and transformers leaves out.
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "head_dim": 64}
DEEPSEEK = {**LATENT, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
#: By the tiny model of a family.
SERVED: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"hidden_size": 128},
    "qwen3": {},
    "mistral": {},
    "moe": {},
    "mixtral": {},
    "olmoe": {"hidden_size": 128, "head_dim": 32},
    "glm4-moe": {},
    "deepseek": DEEPSEEK,
}
Engines = tuple[VllmEngine, TorchEngine, Decoder]
PROMPT = tuple(int(token) for token in np.random.default_rng(0).integers(5, 90, 60))
PARTS: dict[str, dict[str, bool]] = {"attn": {"train_mlp": False}, "mlp": {"train_attn": False}, "both": {}}


def test_these_are_the_families_that_are_let_through() -> None:
    assert {FAMILIES[name][0].__name__ for name in SERVED} == set(adapters.FAMILIES)


@pytest.fixture(params=SERVED)
def engines(request: pytest.FixtureRequest, vllm_program: Path, tmp_path: Path) -> Iterator[Engines]:
    model = reference(request.param, max_position_embeddings=2 * CONTEXT, **SERVED[request.param])
    decoder = ours(model, tmp_path / "model")
    started = launch(vllm_program, tmp_path / "model")
    engine = VllmEngine(
        decoder.config, (), slots=8, context=CONTEXT, limits=LIMITS, folder=tmp_path / "adapters", launch=started
    )
    try:
        engine.wait_ready(280)
        yield engine, TorchEngine(decoder, (), slots=8, context=CONTEXT), decoder
    finally:
        engine.close()


def test_log_probabilities_are_those_of_torch_engine(engines: Engines, tmp_path: Path) -> None:
    vllm, torch_engine, decoder = engines
    sampling = SamplingParams(max_tokens=40, seed=1, stop_at_eos=False)
    requests = [GenerateRequest("base", PROMPT, sampling, prompt_logprobs=True)]
    for number, (name, targets) in enumerate(PARTS.items()):
        made = random_adapter(decoder, 4, number, train_unembed=False, **targets)
        save_adapter(made, tmp_path / name, base_model="tiny")
        requests.append(replace(requests[0], id=name, adapter=name, adapter_folder=tmp_path / name))
    found = finish(vllm, *requests)
    for request in requests:
        got = found[request.id]
        assert got.error is None, request.id
        (sequence,) = got.sequences
        whole = (*PROMPT, *sequence.tokens.tolist())
        wanted = scored(torch_engine, replace(request, prompt=whole))
        assert got.prompt_logprobs is not None
        np.testing.assert_allclose(got.prompt_logprobs[1:], wanted[: len(PROMPT) - 1], atol=1e-4, err_msg=request.id)
        np.testing.assert_allclose(sequence.logprobs, wanted[len(PROMPT) - 1 :], atol=1e-4, err_msg=request.id)
        without = scored(torch_engine, replace(requests[0], prompt=whole))
        assert request.id == "base" or np.abs(wanted - without).max() > 0.1


def scored(engine: TorchEngine, request: GenerateRequest) -> np.ndarray:
    """The log-probability of each token of the prompt but the first."""
    done: Finished = run(engine, replace(request, sampling=SamplingParams(max_tokens=1)))[request.id]
    assert done.prompt_logprobs is not None
    return np.asarray(done.prompt_logprobs[1:], np.float64)
