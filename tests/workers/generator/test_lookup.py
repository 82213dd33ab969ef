"""Prompt lookup draws what decoding one by one draws, bit for bit, in fewer steps."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.workers.model import models
from workers.generator import forward
from workers.generator.attention import decode_attend
from workers.generator.cache.kv_cache import PAGE_TOKENS
from workers.generator.engine import Finished, GenerateRequest, SamplingParams
from workers.generator.tokens.drafts import shared
from workers.generator.tokens.lookup import Lookup, runs_of
from workers.generator.torch_engine import TorchEngine
from workers.model.adapters.adapter import Adapter, save_adapter
from workers.model.adapters.shape import AdapterShape
from workers.model.decoder import Decoder

from .conftest import EOS, VOCAB, four_adapters, run, spell, until_read
from .test_engine_contract import same

CONTEXT = 200
GREEDY = SamplingParams(temperature=0, max_tokens=70, stop_at_eos=False)


def repeating(seed: int, length: int) -> tuple[int, ...]:
    """A text of a few phrases that come again and again."""
    rng = np.random.default_rng(seed)
    phrases = [rng.integers(12, VOCAB, rng.integers(3, 9)).tolist() for _ in range(3)]
    text: list[int] = []
    while len(text) < length:
        text += phrases[rng.integers(3)]
    return tuple(text[:length])


def engine(decoder: Decoder, **options: Any) -> TorchEngine:
    return TorchEngine(decoder, EOS, decode_text=spell, **{"slots": 24, "context": CONTEXT, **options})


def crowd(adapters: dict[str, Path], seed: int) -> list[GenerateRequest]:
    """Requests of several tenants, each with its own sampling parameters, many with prompts that others have too."""
    rng = np.random.default_rng(seed)
    found = []
    for n in range(16):
        name = ["", *adapters][rng.integers(1 + len(adapters))]
        sampling = SamplingParams(
            max_tokens=int(rng.integers(1, 70)),
            temperature=float(rng.choice([0, 0, 0.2, 1.0])),
            top_p=float(rng.choice([1.0, 0.8])),
            top_k=int(rng.choice([-1, 5])),
            seed=int(rng.integers(1 << 40)),
            stop_at_eos=bool(rng.integers(2)),
            stop_token_ids=(int(rng.integers(12, VOCAB)),),
            stop_strings=(f"<{rng.integers(12, VOCAB)}>",) * int(rng.integers(2)),
        )
        prompt = repeating(int(rng.integers(4)), int(rng.integers(1, 100)))
        more = {"topk_sample_logprobs": n % 3, "return_routed_experts": n % 2 == 1, "priority": n % 2}
        who = {"tenant": name, "adapter": name, "adapter_folder": adapters.get(name)}
        found.append(GenerateRequest(f"r{n}", prompt, sampling, 1 + n % 3, **who, **more))  # type: ignore[arg-type]
    return found


def alike(one: Finished, other: Finished) -> bool:
    """Equal bit for bit, with all that was asked for and all that is billed."""
    pairs = zip(one.sequences, other.sequences, strict=True)
    return (
        one.error is None
        and same(one, other)
        and one.facts == other.facts
        and all(
            np.array_equal(a.topk.logprobs, b.topk.logprobs) if a.topk and b.topk else a.topk is b.topk
            for a, b in pairs
        )
        and all(
            np.array_equal(a.routed_experts, b.routed_experts)
            for a, b in zip(one.sequences, other.sequences, strict=True)
            if a.routed_experts is not None
        )
    )


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_a_crowd_draws_the_same_bits(decoder: Decoder, adapters: dict[str, Path], seed: int) -> None:
    requests = crowd(adapters, seed)
    plain, tried = engine(decoder), engine(decoder, lookup=5)
    for again in ("", "again "):  # then with prompts from the prefix cache
        asked = [replace(request, id=again + request.id) for request in requests]
        wanted, found = run(plain, *asked), run(tried, *asked)
        assert all(alike(wanted[request.id], found[request.id]) for request in asked)
    counts = tried.stats()
    assert counts.sampled_tokens == plain.stats().sampled_tokens
    assert 20 < counts.accepted_tokens < counts.drafted_tokens


@pytest.fixture(scope="module", params=["gpt-oss", "deepseek"])
def special(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Layers with windows and sinks, and pages of their own; and latent attention."""
    sizes = {"sliding_window": 40} if request.param == "gpt-oss" else {}
    model = models.reference(request.param, vocab_size=VOCAB, max_position_embeddings=CONTEXT, **sizes)
    return models.ours(model, tmp_path_factory.mktemp("special"))


@pytest.mark.parametrize(
    ("special", "path"),
    [
        ("gpt-oss", "torch"),
        ("deepseek", "native"),
        pytest.param("gpt-oss", "native", marks=pytest.mark.long),
        pytest.param("deepseek", "torch", marks=pytest.mark.long),
    ],
    indirect=["special"],
)
def test_in_a_tight_crowd_of_other_attention(
    special: Decoder, path: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences are set aside, prompts come in pieces, and pages are given back."""
    if path == "torch":
        monkeypatch.setattr(decode_attend, "library", lambda source: None)
    long = {"max_tokens": 60, "stop_at_eos": False, "stop_token_ids": (), "stop_strings": ()}
    requests = [
        replace(request, sampling=replace(request.sampling, **long))  # type: ignore[arg-type]
        for request in crowd(four_adapters(special, tmp_path_factory), 7)[:7]
    ]
    wanted = run(engine(special), *requests)
    tight = engine(special, lookup=5, kv_tokens=12 * PAGE_TOKENS, prefill_tokens=PAGE_TOKENS)
    found = run(tight, *requests)
    assert all(same(wanted[request.id], found[request.id]) for request in requests)
    assert tight.stats().preempted > 0
    assert tight.stats().accepted_tokens > 0
    assert tight.stats().kv_tokens_used == 0


@pytest.fixture(scope="module")
def loops(decoder: Decoder) -> tuple[GenerateRequest, list[int]]:
    """A request whose sample repeats itself in a circle, and its tokens."""
    request = GenerateRequest("loops", repeating(2, 20), GREEDY)
    return request, run(engine(decoder), request)["loops"].sequences[0].tokens.tolist()


def test_a_circle_takes_a_fraction_of_the_steps(decoder: Decoder, loops: tuple[GenerateRequest, list[int]]) -> None:
    request, tokens = loops
    tried = engine(decoder, lookup=8)
    assert run(tried, request)["loops"].sequences[0].tokens.tolist() == tokens
    counts = tried.stats()
    assert counts.decode_steps + counts.accepted_tokens == len(tokens) - 1  # the first comes from the prefill
    assert counts.decode_steps < len(tokens) / 2


def test_ends_within_a_draft(decoder: Decoder, loops: tuple[GenerateRequest, list[int]]) -> None:
    """At every length, and at a stop token and a stop string wherever the circle has one for the first time."""
    request, tokens = loops
    ends = [replace(GREEDY, max_tokens=length) for length in range(1, len(tokens) + 1)]
    ends += [replace(GREEDY, stop_token_ids=(token,)) for token in set(tokens)]
    ends += [replace(GREEDY, stop_strings=(spell(tokens[at : at + 2]),)) for at in range(30)]
    asked = [replace(request, id=f"{n}", sampling=sampling) for n, sampling in enumerate(ends)]
    tried = engine(decoder, lookup=8, slots=200)
    wanted, found = run(engine(decoder), *asked), run(tried, *asked)
    assert all(alike(wanted[one.id], found[one.id]) for one in asked)
    assert tried.stats().accepted_tokens > 500


def test_the_context_ends_within_a_draft(decoder: Decoder, loops: tuple[GenerateRequest, list[int]]) -> None:
    request = replace(loops[0], sampling=replace(GREEDY, max_tokens=None))
    for context in range(66, 70):
        wanted, found = (run(engine(decoder, context=context, lookup=most), request)["loops"] for most in (0, 8))
        assert alike(wanted, found)
        assert len(found.sequences[0].tokens) == context - len(request.prompt) + 1


def test_a_swap_between_two_steps(decoder: Decoder, tmp_path: Path) -> None:
    """Keys and values of accepted tokens are the old policy's, as with tokens drawn one by one."""
    for version in (0, 1):
        adapter = Adapter.init(AdapterShape(decoder.config, 4), seed=0, scale=1.0)
        noise = torch.randn(adapter.flat.shape, generator=torch.Generator().manual_seed(version))
        adapter.flat.add_(noise, alpha=0.01)
        save_adapter(adapter, tmp_path / str(version), base_model="tiny", details={"step": version})
    request = GenerateRequest("r", repeating(1, 20), GREEDY, adapter="mine", adapter_folder=tmp_path / "0")

    def swapped(at: int, most: int) -> tuple[Finished, int]:
        """The result when the other weights come at the first step after so many tokens."""
        made = engine(decoder, lookup=most)
        made.add(request)
        until_read(made)
        while not made.so_far("r") or len(made.so_far("r")[0].tokens) < at:
            made.step()
        had = len(made.so_far("r")[0].tokens)
        made.swap_adapter("mine", tmp_path / "1")
        until_read(made)
        return run(made)["r"], had

    jumped = 0
    for at in (20, 40):
        found, had = swapped(at, 8)
        wanted, there = swapped(had, 0)
        assert there == had
        assert alike(wanted, found)
        assert wanted.sequences[0].policy == found.sequences[0].policy
        assert [span.version for span in found.sequences[0].policy] == [0, 1]
        jumped += had - at
    assert jumped > 0, "no draft was to come true around a swap"


def test_a_draft_that_is_not_finite_costs_nobody_anything(
    decoder: Decoder, loops: tuple[GenerateRequest, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_attend, "library", lambda source: None)  # in torch, what is masked is multiplied by zero
    requests = [loops[0], GenerateRequest("other", repeating(2, 9), replace(GREEDY, temperature=0.7, seed=1))]
    wanted = run(engine(decoder), *requests)
    made = engine(decoder, lookup=4)
    plain, poisoned = made._decoding.launch, 0

    def poisons(plan: forward.DecodePlan) -> Tensor:
        nonlocal poisoned
        logits_RV = plain(plan)
        for row, logits_V in zip(plan.rows, logits_RV, strict=True):
            if row.sequence.draft:
                logits_V.fill_(math.nan)
            if row.ahead:
                poisoned += 1
                page, at = row.pages[0].of(row.position), row.position % PAGE_TOKENS
                made._cache.k_NKDP[0][page, :, :, at] = math.nan
                made._cache.v_NKPD[0][page, :, at] = math.nan
        return logits_RV

    made._decoding.launch = poisons
    found = run(made, *requests)
    assert poisoned > 20
    assert all(alike(wanted[request.id], found[request.id]) for request in requests)


def test_drafts_take_only_what_nobody_needs(decoder: Decoder, loops: tuple[GenerateRequest, list[int]]) -> None:
    made = engine(decoder, slots=6, lookup=16, kv_tokens=6 * CONTEXT)
    plain, most, left = made._decoding.launch, {count: 0 for count in range(1, 7)}, set[int]()

    def counts(plan: forward.DecodePlan) -> Tensor:
        assert len(plan.rows) <= 6
        left.update(row.owner.rule.limit - len(row.sequence.tokens) - row.ahead for row in plan.rows if row.ahead)
        most[len(plan.sequences)] = max(most[len(plan.sequences)], len(plan.rows))
        return plain(plan)

    made._decoding.launch = counts
    samplings = [replace(GREEDY, max_tokens=20 + 30 * n) for n in range(6)]
    run(made, *(replace(loops[0], id=f"{n}", sampling=sampling) for n, sampling in enumerate(samplings)))
    assert {rows for rows in most.values() if rows} == {6}, "all rows were to be used, and no more"
    assert most[1] == most[5] == 6
    assert min(left) == 1, "a row was to try the last token that its sequence may have, and none a further one"
    assert made.stats().preempted == 0


@pytest.mark.parametrize("family", ["qwen3-next", "nemotron-h"])
def test_recurrent_models_try_nothing(family: str, tmp_path: Path) -> None:
    hybrid = models.ours(models.reference(family, vocab_size=VOCAB), tmp_path)
    request = GenerateRequest("r", repeating(1, 40), replace(GREEDY, max_tokens=30))
    wanted, tried = run(engine(hybrid), request)["r"], engine(hybrid, lookup=8)
    assert alike(wanted, run(tried, request)["r"])
    assert tried.stats().drafted_tokens == 0


# -- what is looked up


def drafted(prompt: list[int], tokens: list[int], most: int) -> list[int]:
    """The draft for these tokens, when no earlier ones are known."""
    return Lookup(prompt, runs_of(prompt)).draft(tokens, most)


def test_a_draft_is_what_followed_the_last_time() -> None:
    assert drafted([1, 2, 3, 4, 5, 6, 1, 2], [3], 2) == [4, 5]
    assert drafted([1, 2, 3, 4, 1, 2, 3, 7, 8, 1, 2], [3], 2) == [7, 8]
    assert drafted([1, 2, 3, 4, 5], [6, 7, 1, 2, 3], 3) == [4, 5, 6]
    assert drafted([5, 1, 2], [3, 9, 1, 2, 3], 1) == [9], "a run across the end of the prompt"


def test_nothing_is_drafted_of_what_is_new() -> None:
    assert drafted([1, 2, 3, 4], [5], 4) == []
    assert drafted([1], [2], 4) == []
    assert drafted([1, 2, 3, 4, 2], [3], 4) == [], "two tokens are no run"
    assert drafted([1, 2, 3, 4, 1, 2], [3], 0) == []


def test_a_circle_goes_on() -> None:
    assert drafted([1, 2], [3, 1, 2, 3, 1, 2, 3], 8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert drafted([4, 4, 4], [4, 4, 4], 5) == [4] * 5


def test_drafts_grow_with_what_comes_true() -> None:
    text = Lookup([1, 2], runs_of([1, 2]))
    tokens = [3, 1, 2, 3]
    assert len(text.draft(tokens, 16)) == 8
    for new, length in [(1, 2), (3, 6), (7, 14), (15, 16), (1, 2)]:
        tokens += [tokens[-3 + n % 3] for n in range(new)]
        assert len(text.draft(tokens, 16)) == length


def test_rows_are_divided_evenly() -> None:
    assert shared([], 4) == []
    assert shared([3, 1, 5], 20) == [3, 1, 5]
    assert shared([4, 1, 4], 7) == [3, 1, 3]
    assert shared([4, 4, 4], 2) == [0, 1, 1]
    assert sum(shared([2, 7, 3, 9], 13)) == 13
