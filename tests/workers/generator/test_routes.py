"""Rollout routing replay: an engine reports the experts that computed each token, and training sends it to the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from weft.wire.binary.sample_codec import SequenceResult

from tests.workers.generator.conftest import EOS, EngineFactory, run, until_read
from workers.generator.engine import GenerateRequest, SamplingParams
from workers.generator.torch_engine import TorchEngine
from workers.model.adapters.adapter import load_adapter
from workers.model.attend import PackedAttend
from workers.model.decoder import Decoder
from workers.model.logprobs import target_logprobs
from workers.model.lora.rows import LoraRows

PROMPT = tuple(range(5, 45))
FREE_RUN = SamplingParams(max_tokens=24, seed=1, stop_at_eos=False)


@contextmanager
def other_routers() -> Iterator[None]:
    """Routers whose scores round differently, so that near ties go to other experts; their weights stay the same."""
    real, generator = torch.topk, torch.Generator().manual_seed(9)

    def topk(scores: Tensor, k: int, dim: int = -1) -> tuple[Tensor, Tensor]:
        noise = 0.2 * torch.rand(scores.shape, generator=generator)
        chosen = real(scores + noise, k, dim=dim).indices
        return scores.gather(dim, chosen), chosen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "topk", topk)
        patch.setattr("workers.model.mixture.router.packed", lambda _: None)  # the kernel chooses by itself
        yield


def ask(name: str, adapters: dict[str, Path], **options: object) -> GenerateRequest:
    base = {"prompt": PROMPT, "sampling": FREE_RUN, "return_routed_experts": True, **options}
    return GenerateRequest(name, adapter="a0", adapter_folder=adapters["a0"], **base)  # type: ignore[arg-type]


def retrained(decoder: Decoder, folder: Path, sequence: SequenceResult, *, replay: bool) -> np.ndarray:
    """The trainer's logprobs of the sampled tokens."""
    inputs = [*PROMPT, *sequence.tokens.tolist()][:-1]
    count, length = len(sequence.tokens), len(inputs)
    lora = LoraRows([0, length], [load_adapter(folder, decoder.config).adapter])
    routes = None
    if replay:
        assert sequence.routed_experts is not None
        routes = torch.from_numpy(sequence.routed_experts).transpose(0, 1).contiguous()
    with torch.no_grad():
        tokens, positions = torch.tensor(inputs), torch.arange(length)
        hidden = decoder(tokens, positions, PackedAttend([length]), lora, None, routes)
        rows = torch.arange(length - count, length)
        found: np.ndarray = target_logprobs(
            decoder, hidden, rows, torch.from_numpy(sequence.tokens).long(), lora
        ).numpy()
    return found


def mismatch(sampled: np.ndarray, trained: np.ndarray) -> float:
    """KL of sampler and trainer by the k3 estimator, mean over tokens: r - log r - 1, r = exp(trained - sampled)."""
    log_ratio = trained.astype(np.float64) - sampled
    return float((np.exp(log_ratio) - log_ratio - 1).mean())


def test_mismatch_falls_to_round_off_with_replay(
    make_engine: EngineFactory, decoder: Decoder, adapters: dict[str, Path]
) -> None:
    with other_routers():
        (sequence,) = run(make_engine(), ask("r", adapters))["r"].sequences
    assert sequence.logprobs is not None
    free = mismatch(sequence.logprobs, retrained(decoder, adapters["a0"], sequence, replay=False))
    replayed = mismatch(sequence.logprobs, retrained(decoder, adapters["a0"], sequence, replay=True))
    assert free > 1e-4
    assert replayed < 1e-10


def test_without_noise_the_trainer_chooses_the_same(
    make_engine: EngineFactory, decoder: Decoder, adapters: dict[str, Path]
) -> None:
    (sequence,) = run(make_engine(), ask("r", adapters))["r"].sequences
    routes = sequence.routed_experts
    assert routes is not None
    config = decoder.config
    assert routes.shape == (len(PROMPT) + 24 - 1, len(config.mixture_layers), config.experts_per_token)
    plain, replayed = (retrained(decoder, adapters["a0"], sequence, replay=replay) for replay in (False, True))
    assert np.array_equal(plain, replayed)


def test_routes_are_the_same_in_any_company(decoder: Decoder, adapters: dict[str, Path]) -> None:
    """Alone, in a crowd, in pieces, after a prefix-cache hit, as one of many, and set aside for lack of room."""

    def engine(**options: int) -> TorchEngine:
        return TorchEngine(decoder, EOS, context=96, **{"slots": 8, **options})

    (alone,) = run(engine(), ask("r", adapters))["r"].sequences
    others = [GenerateRequest(f"o{i}", prompt=(7, 8, i), sampling=FREE_RUN) for i in range(5)]
    crowd = run(engine(prefill_tokens=32), *others, ask("r", adapters))
    assert all(sequence.routed_experts is None for other in others for sequence in crowd[other.id].sequences)
    cached = engine()
    run(cached, ask("first", adapters))
    hit = run(cached, ask("r", adapters))["r"]
    assert hit.facts.cache_hit > 0
    tight = engine(kv_tokens=128)
    tight.add(ask("r", adapters))
    until_read(tight)
    for _ in range(3):
        tight.step()
    squeezed = run(tight, GenerateRequest("urgent", prompt=tuple(range(70)), sampling=FREE_RUN, priority=1))
    assert tight.stats().preempted > 0
    several = run(engine(slots=2), ask("r", adapters, num_samples=3))["r"].sequences
    for found in (crowd["r"].sequences[0], hit.sequences[0], squeezed["r"].sequences[0], several[0]):
        assert np.array_equal(found.tokens, alone.tokens)
        assert np.array_equal(found.routed_experts, alone.routed_experts)
    for sequence in several:
        assert sequence.routed_experts is not None
        assert alone.routed_experts is not None
        assert np.array_equal(sequence.routed_experts[: len(PROMPT)], alone.routed_experts[: len(PROMPT)])


def test_cached_prompts_without_routes_are_computed_again(decoder: Decoder, adapters: dict[str, Path]) -> None:
    """Their routes were not recorded."""
    engine = TorchEngine(decoder, EOS, slots=4, context=96)
    plain = ask("plain", adapters, return_routed_experts=False)
    run(engine, plain)
    found = run(engine, ask("r", adapters))["r"]
    assert found.facts.cache_hit == 0
    assert found.facts.prefill == len(PROMPT)


def test_what_was_cut_short_has_its_routes(decoder: Decoder, adapters: dict[str, Path]) -> None:
    engine = TorchEngine(decoder, EOS, slots=4, context=96)
    engine.add(ask("r", adapters))
    until_read(engine)
    for _ in range(6):
        engine.step()
    finished = engine.cancel("r")
    assert finished is not None
    (sequence,) = finished.sequences
    assert sequence.routed_experts is not None
    assert len(sequence.routed_experts) == len(PROMPT) + len(sequence.tokens) - 1
    (whole,) = run(engine, ask("again", adapters))["again"].sequences
    assert whole.routed_experts is not None
    assert np.array_equal(whole.routed_experts[: len(sequence.routed_experts)], sequence.routed_experts)
