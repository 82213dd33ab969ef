"""Layers with a sliding window give back the pages that they have passed; nobody's bits change by it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.workers.model.models import ours, random_adapter, reference
from workers.generator import torch_engine
from workers.generator.attention import decode_attend
from workers.generator.cache.kv_cache import PAGE_TOKENS
from workers.generator.cache.page_groups import PageGroup, page_groups
from workers.generator.engine import Finished, GenerateRequest, SamplingParams
from workers.generator.torch_engine import TorchEngine
from workers.model.adapters.adapter import save_adapter
from workers.model.config import DecoderConfig
from workers.model.decoder import Decoder

from .conftest import run
from .test_engine_contract import prompt, same

B = PAGE_TOKENS
CONTEXT = 320
SAMPLED = SamplingParams(max_tokens=120, seed=4, stop_at_eos=False)


@pytest.fixture(scope="module", params=["mistral", "gpt-oss"])
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """All layers with a window of 40 positions; two of three."""
    model = reference(request.param, vocab_size=97, max_position_embeddings=CONTEXT, sliding_window=40)
    return ours(model, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def requests(windowed: Decoder, tmp_path: Path) -> list[GenerateRequest]:
    """Prompts shorter than a window, which grow to several, and much longer ones, some that begin alike, with siblings,
    with routes."""
    save_adapter(random_adapter(windowed, 3, 3), tmp_path / "a", base_model="tiny")
    kinds = [("", 7), ("a", 9), ("", 4), ("a", 11), ("", 5)]
    kinds += [("a", 2 * B), ("a", 5 * B + 3), ("a", 5 * B + 3), ("", 4 * B), ("a", 5 * B + 20)]
    return [
        GenerateRequest(
            f"r{n}", prompt(length, seed=1), replace(SAMPLED, max_tokens=65 if n < 5 else 15 + 20 * (n % 3)),
            num_samples=1 + n % 3 * (n > 4), adapter=name, adapter_folder=tmp_path / name if name else None,
            prompt_logprobs=n == 8, return_routed_experts=n == 6 and windowed.config.num_experts > 0,
        )
        for n, (name, length) in enumerate(kinds)
    ]  # fmt: skip


def engine(decoder: Decoder, **options: Any) -> TorchEngine:
    return TorchEngine(decoder, (), context=CONTEXT, **{"slots": 8, **options})


@pytest.mark.parametrize(
    ("windowed", "path"),
    [
        ("mistral", "torch"),
        ("gpt-oss", "native"),
        pytest.param("mistral", "native", marks=pytest.mark.long),
        pytest.param("gpt-oss", "torch", marks=pytest.mark.long),
    ],
    indirect=["windowed"],
)
def test_what_is_given_back_changes_no_bit(
    windowed: Decoder, requests: list[GenerateRequest], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a tight crowd, with prompts in pieces, hits and sequences set aside, against one that keeps all."""
    if path == "torch":
        monkeypatch.setattr(decode_attend, "library", lambda source: None)
    with monkeypatch.context() as patch:
        patch.setattr(torch_engine, "page_groups", lambda config, context: (PageGroup((*range(config.num_layers),)),))
        wanted = [run(engine(windowed, prefix_bytes=0), request)[request.id] for request in requests]
    assert not any(finished.error for finished in wanted)
    tight = engine(windowed, kv_tokens=10 * B, prefill_tokens=B)
    for id_of in ("{}", "again {}"):
        found: dict[str, Finished] = run(tight, *(replace(one, id=id_of.format(one.id)) for one in requests))
        assert all(same(one, found[id_of.format(one.id)]) for one in wanted)
    assert tight.stats().preempted > 0
    assert tight.stats().kv_tokens_used == 0
    hits = {one.id: found[f"again {one.id}"].facts.cache_hit for one in requests}
    assert hits["r7"] == 5 * B
    assert hits["r9"] == 5 * B


def test_a_long_sequence_holds_no_more_than_its_windows(windowed: Decoder) -> None:
    """A prompt in pieces of two pages, and then every step."""
    groups = page_groups(windowed.config, CONTEXT)
    made = engine(windowed, slots=1, prefill_tokens=2 * B, prefix_bytes=0)
    made.add(GenerateRequest("r", prompt(6 * B), replace(SAMPLED, max_tokens=100)))
    most = 0
    while made.busy:
        made.step()
        used = made._cache.pages - made._seating.pool.free
        most = max(most, used)
        for sequence in made._seating._seated:
            whole = -(-sequence.position // B)
            held = [len(of.pages) for of in sequence.pages]
            assert sum(held) == used
            if sequence.tokens:
                assert all(n <= (whole + 1 if not of.window else 3) for of, n in zip(groups, held, strict=True))
            else:
                assert all(n <= (6 if not of.window else 4) for of, n in zip(groups, held, strict=True))
    whole_groups = sum(not group.window for group in groups)
    assert most <= whole_groups * 10 + (len(groups) - whole_groups) * 4


def config_of(**fields: Any) -> DecoderConfig:
    sizes = {"vocab_size": 97, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    return DecoderConfig("X", **{**sizes, "intermediate_size": 64, "context_length": 4096, **fields})


def test_layers_with_and_without_a_window_are_groups_of_equal_size() -> None:
    gpt_oss = config_of(num_layers=24, window=128, window_layers=tuple(range(0, 24, 2)), num_experts=32)
    assert page_groups(gpt_oss, 4096) == (
        PageGroup(tuple(range(1, 24, 2))),
        PageGroup(tuple(range(0, 24, 2)), 128),
    )
    two_of_three = config_of(num_layers=6, window=128, window_layers=(0, 1, 3, 4))
    assert [(g.layers, g.window) for g in page_groups(two_of_three, 4096)] == [
        ((2, 5), 0),
        ((0, 1), 128),
        ((3, 4), 128),
    ]
    mistral = config_of(num_layers=4, window=1024, window_layers=(0, 1, 2, 3))
    assert page_groups(mistral, 4096) == (PageGroup((0, 1, 2, 3), 1024),)


def test_where_groups_are_not_worth_it_all_layers_are_one() -> None:
    short = config_of(num_layers=4, window=1024, window_layers=(0, 2))
    assert page_groups(short, 1024) == (PageGroup((0, 1, 2, 3)),)
    odd = config_of(num_layers=9, window=64, window_layers=(0, 1))
    assert page_groups(odd, 4096) == (PageGroup(tuple(range(9))),)
    routed = config_of(num_layers=4, window=64, window_layers=(0, 1, 2, 3), num_experts=8)
    assert page_groups(routed, 4096) == (PageGroup((0, 1, 2, 3)),)
