"""Several base models on one server, and models that cannot be served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.e2e.conftest import Weftd, weftd_command
from tests.e2e.data import ADAM, prompt, supervised
from tests.workers.model.models import reference
from workers.model.tiny import TINY_PATH

pytestmark = pytest.mark.server

SIZES = {
    "vocab_size": 1560,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


DELTA = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
LATENT = {
    **SIZES,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "n_routed_experts": 32,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}


def save(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_PATH / name, folder / name)
    return folder


@pytest.fixture
def models(tmp_path: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "meta-llama/Llama-tiny": LlamaForCausalLM(LlamaConfig(**SIZES)),
        "Qwen/Qwen3-tiny": Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
        "Qwen/Qwen2.5-tiny": Qwen2ForCausalLM(Qwen2Config(**SIZES)),
        "mistralai/Mistral-tiny": MistralForCausalLM(MistralConfig(**SIZES, sliding_window=16)),
        "mistralai/Mixtral-tiny": MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)),
        "allenai/OLMoE-tiny": OlmoeForCausalLM(OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2)),
        "zai-org/GLM-tiny": Glm4MoeForCausalLM(
            Glm4MoeConfig(**SIZES, n_routed_experts=32, moe_intermediate_size=32, num_experts_per_tok=4)
        ),
        "deepseek-ai/DeepSeek-tiny": DeepseekV3ForCausalLM(
            DeepseekV3Config(
                **LATENT, first_k_dense_replace=1, rope_parameters={**ROPE, "mscale": 1.0, "mscale_all_dim": 1.0}
            )
        ),
        "zai-org/GLM-Flash-tiny": Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(**LATENT)),
        "inclusionAI/Ling-tiny": reference("bailing", vocab_size=1560, max_position_embeddings=512),
        "openai/gpt-oss-tiny": GptOssForCausalLM(
            GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=16, rope_parameters=ROPE)
        ),
        "Qwen/Qwen3-Next-tiny": Qwen3NextForCausalLM(
            Qwen3NextConfig(**SIZES, **DELTA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
        ),
        "Qwen/Qwen3.5-tiny": reference("qwen3.5", vocab_size=1560, max_position_embeddings=512),
        "Qwen/Qwen3.5-MoE-tiny": reference("qwen3.5-moe", vocab_size=1560, max_position_embeddings=512),
        "nvidia/Nemotron-3-tiny": reference("nemotron-h", vocab_size=1560, max_position_embeddings=512),
    }


def test_a_local_model_of_every_family_is_served_and_equals_transformers(
    own_weftd: Callable[..., Weftd], models: dict[str, Any], tmp_path: Path
) -> None:
    folders = {name: save(tmp_path / name, model) for name, model in models.items()}
    server = own_weftd(*[part for name, folder in folders.items() for part in ("--model", f"{name}={folder}")])
    service = tinker.ServiceClient(base_url=server.url, api_key=server.key())
    served = {m.model_name for m in service.get_server_capabilities().supported_models}
    assert served == set(models)
    for name, model in models.items():
        scored = service.create_sampling_client(base_model=name).result().compute_logprobs(prompt(12)).result()
        with torch.no_grad():
            tokens = torch.tensor([prompt(12).to_ints()])
            logprobs = model(tokens).logits.log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
        np.testing.assert_allclose(np.array(scored[1:], dtype=float), logprobs.numpy(), atol=1e-4)
        run = service.create_lora_training_client(name, rank=4).result()
        data = supervised()
        first = run.forward_backward(data, "cross_entropy").result().metrics["loss:sum"]
        run.optim_step(ADAM).result()
        assert run.forward(data, "cross_entropy").result().metrics["loss:sum"] < first
        sampler = run.save_weights_and_get_sampling_client().result()
        reply = sampler.sample(prompt(), 1, types.SamplingParams(max_tokens=4, stop=[])).result()
        assert len(reply.sequences[0].tokens) == 4


def refused(data_dir: Path, model: str) -> str:
    ended = weftd_command("serve", "--port", "0", "--data-dir", data_dir, "--model", model)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert len(ended.stderr.strip().splitlines()) == 1, ended.stderr
    return ended.stderr


def test_an_unsupported_architecture_is_refused_by_name(tmp_path: Path) -> None:
    folder = shutil.copytree(TINY_PATH, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    )
    said = refused(tmp_path / "data", f"x/mamba={folder}")
    assert "MambaForCausalLM" in said
    assert "Qwen3MoeForCausalLM" in said


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "nowhere" in refused(tmp_path / "data", f"x/y={tmp_path / 'nowhere'}")


def test_a_second_server_on_the_same_folder_is_refused(weftd: Weftd) -> None:
    ended = weftd_command("serve", "--port", "0", "--data-dir", weftd.data_dir)
    assert ended.returncode == 2
    assert "another weftd" in ended.stderr
