"""The engine's contract with a model of latent attention, whose cache keeps latents: other tests, run again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workers.model import models
from workers.generator.engine import GenerateRequest, SamplingParams
from workers.generator.torch_engine import TorchEngine
from workers.model.attend import PackedAttend
from workers.model.base.weights import load_decoder
from workers.model.card import ModelCard
from workers.model.decoder import Decoder
from workers.model.logprobs import target_logprobs
from workers.model.planning.check import check_model

from .conftest import VOCAB, four_adapters, run
from .test_devices import TARGETS, test_sampler_and_trainer_agree as sampler_and_trainer_agree
from .test_engine_contract import (  # noqa: F401
    test_a_resumed_sample_goes_on_as_the_first_would_have,
    test_a_seeded_request_is_the_same_alone_and_in_a_crowd,
    test_swap_takes_effect_while_others_keep_generating,
)
from .test_prefix_cache import (  # noqa: F401
    test_a_hit_changes_no_bit,
    test_a_prompt_resumed_after_its_partial_sample_hits,
    test_pieces_change_no_bit,
)
from .test_seating import test_alone_and_in_a_tight_crowd_that_swaps_and_prefills_in_pieces  # noqa: F401
from .test_torch_engine import (
    test_logprobs_equal_the_trainers,  # noqa: F401
    test_where_rows_mind_their_neighbours_each_is_computed_alone,  # noqa: F401
)


@pytest.fixture
def threads() -> Iterator[int]:
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(1)


def reference(**overrides: Any) -> Any:
    return models.reference("deepseek", vocab_size=VOCAB, max_position_embeddings=512, **overrides)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return models.ours(reference(), tmp_path_factory.mktemp("latent"))


@pytest.fixture(scope="module")
def adapters(decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return four_adapters(decoder, tmp_path_factory)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), TARGETS)
def test_other_dtypes_and_devices(tmp_path: Path, device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Without experts, whose choice depends on finer differences than bfloat16 has."""
    sampler_and_trainer_agree(reference(first_k_dense_replace=3), {}, tmp_path, device, dtype, tolerance)


def test_in_bfloat16_experts_are_what_sampler_and_trainer_may_disagree_about(tmp_path: Path) -> None:
    """Latents and heads round differently, which decides where two experts score nearly alike. With the sampler's
    routes replayed no token differs more than without experts."""
    reference().save_pretrained(tmp_path)
    decoder, prompt = load_decoder(tmp_path, torch.bfloat16), tuple(range(3, 43))
    asked = GenerateRequest(
        "r", prompt, SamplingParams(max_tokens=100, seed=3, stop_at_eos=False), return_routed_experts=True
    )
    (drawn,) = run(TorchEngine(decoder, (), slots=1, context=160), asked)["r"].sequences
    assert drawn.routed_experts is not None
    tokens = torch.tensor([*prompt, *drawn.tokens.tolist()])
    at, routes_LMK = torch.arange(len(tokens) - 1), torch.from_numpy(drawn.routed_experts)
    chosen: list[Tensor] = []

    def off(replay_MLK: Tensor | None) -> Tensor:
        """How far each sampled token's log-probability is from the sampler's."""
        with torch.no_grad():
            attend = PackedAttend([len(at)])
            hidden = decoder(tokens[:-1], at, attend, None, lambda _, experts: chosen.append(experts), replay_MLK)
            found = target_logprobs(decoder, hidden, at, tokens[1:], None)[len(prompt) - 1 :]
        return (found - torch.from_numpy(drawn.logprobs)).abs()

    free = off(None)
    own_LMK = torch.stack(chosen, dim=1)
    others = (own_LMK.sort(-1).values != routes_LMK.sort(-1).values).flatten(1).any(1)[len(prompt) - 1 :]
    assert 0 < others.sum() < 0.15 * len(others)
    assert free[others].max() > 0.15
    assert free[~others].max() < 0.15
    assert off(routes_LMK.transpose(0, 1).contiguous()).max() < 0.15


def test_what_is_kept_of_a_token_is_its_latent(decoder: Decoder, tmp_path: Path) -> None:
    """And `weftd model check` says the same."""
    pages = [p for p in kept(TorchEngine(decoder, (), slots=1, context=64)) if p.dtype.is_floating_point]
    latent, turning, layers = 40, 8, 3
    assert sum(page.numel() for page in pages) == 32 * layers * (latent + turning)
    assert check_model(ModelCard("m", tmp_path, decoder.config, ()), "float32").kv_bytes_per_token == 4 * 3 * 48


def kept(engine: TorchEngine) -> list[Tensor]:
    """One page of everything that the cache keeps."""
    return [tensor[0] for tensor in engine._cache.tensors]
