"""Prompts that begin alike: what is kept of them, and that no result shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from workers.generator.cache.prefix_cache import BLOCK_TOKENS, BlockIndex, Chain
from workers.generator.engine import Engine, Finished, GenerateRequest, SamplingParams

from .conftest import VOCAB, run
from .test_engine_contract import prompt, same

MakeEngine = Callable[..., Engine]
B = BLOCK_TOKENS
SHORT = SamplingParams(max_tokens=6, seed=4, stop_at_eos=False)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


def asking(id: str, tokens: tuple[int, ...], **fields: object) -> GenerateRequest:
    return GenerateRequest(id, tokens, **{"sampling": SHORT, **fields})  # type: ignore[arg-type]


def equal(a: Finished, b: Finished) -> bool:
    """Sequences, and all that was asked about the prompt, are equal bit for bit."""
    pairs = [(a.prompt_logprobs, b.prompt_logprobs), (a.target_logprobs, b.target_logprobs)]
    if a.topk_prompt_logprobs is not None and b.topk_prompt_logprobs is not None:
        pairs += [(a.topk_prompt_logprobs.logprobs, b.topk_prompt_logprobs.logprobs)]
    equal_scores = all(x is y or np.array_equal(x, y, equal_nan=True) for x, y in pairs)  # type: ignore[arg-type]
    return same(a, b) and equal_scores


# -- bits and counts


@pytest.mark.parametrize("name", ["", "a0", "a1", "a3"])
@pytest.mark.parametrize("length", [B, B + 1, 3 * B - 1, 3 * B, 3 * B + 7])
def test_a_hit_changes_no_bit(
    make_engine: MakeEngine, adapters: dict[str, Path], threads: int, name: str, length: int
) -> None:
    tokens = prompt(length, seed=length)
    request = asking("r", tokens, num_samples=2, adapter=name, adapter_folder=adapters.get(name))
    cold = run(make_engine(context=160, prefix_bytes=0), request)["r"]
    assert cold.facts.cache_hit == 0
    engine = make_engine(context=160)
    first = run(engine, replace(request, id="first"), replace(request, id="other", prompt=prompt(B + 9)))["first"]
    again = run(engine, request, replace(request, id="other", prompt=tokens[: B // 2]))["r"]
    hit = (length - 1) // B * B
    assert (first.facts.cache_hit, again.facts.cache_hit) == (0, hit)
    assert (again.facts.prefill, again.facts.cached_prefill) == (length - hit, hit + length)
    assert equal(first, cold)
    assert equal(again, cold)


@pytest.mark.parametrize("name", ["", "a0"])
def test_pieces_change_no_bit(make_engine: MakeEngine, adapters: dict[str, Path], threads: int, name: str) -> None:
    request = asking("r", prompt(5 * B + 3), adapter=name, adapter_folder=adapters.get(name), prompt_logprobs=True,
                     topk_prompt_logprobs=4)  # fmt: skip
    whole = run(make_engine(context=200), request)["r"]
    for budget in (1, B, 2 * B + 5):
        engine = make_engine(context=200, prefill_tokens=budget)
        assert equal(run(engine, request)["r"], whole)
        assert engine.stats().prefill_tokens == 5 * B + 3


def test_a_prompt_resumed_after_its_partial_sample_hits(make_engine: MakeEngine) -> None:
    engine = make_engine(context=200)
    tokens = prompt(2 * B + 4)
    sampled = run(engine, asking("r", tokens))["r"].sequences[0].tokens.tolist()
    resumed = asking("r", (*tokens, *sampled))
    again = run(engine, resumed)["r"]
    assert again.facts.cache_hit == 2 * B
    assert equal(again, run(make_engine(context=200), resumed)["r"])


def test_a_branch_hits_the_common_part(make_engine: MakeEngine) -> None:
    engine = make_engine(context=200)
    common = prompt(2 * B)
    run(engine, asking("a", common + prompt(B, seed=1)))
    branch = asking("b", common + prompt(B + 2, seed=2))
    hit = run(engine, branch)["b"]
    assert hit.facts.cache_hit == 2 * B
    assert equal(hit, run(make_engine(context=200), branch)["b"])


def test_equal_prompts_that_arrive_together_are_computed_once(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=8, context=200)
    tokens = prompt(3 * B + 5)
    group = [asking(f"r{i}", tokens, sampling=replace(SHORT, seed=i)) for i in range(6)]
    finished = run(engine, *group)
    assert engine.stats().prefill_tokens == 3 * B + 5 + 5 * 5
    assert sum(f.facts.cache_hit for f in finished.values()) == 5 * 3 * B
    for request in group:
        assert equal(finished[request.id], run(make_engine(context=200), request)[request.id])


def test_adapters_do_not_share(make_engine: MakeEngine, adapters: dict[str, Path]) -> None:
    engine = make_engine(context=200)
    base = asking("base", prompt(2 * B + 1))
    others = [replace(base, id=name, adapter=name, adapter_folder=folder) for name, folder in adapters.items()]
    for request in (base, *others):
        assert run(engine, request)[request.id].facts.cache_hit == 0
    assert run(engine, replace(base, id="again"))["again"].facts.cache_hit == 2 * B


def test_tenants_do_not_share(make_engine: MakeEngine) -> None:
    engine = make_engine(context=200)
    mine = asking("mine", prompt(2 * B + 1), tenant="a")
    run(engine, mine)
    assert run(engine, replace(mine, id="other", tenant="b"))["other"].facts.cache_hit == 0
    assert run(engine, replace(mine, id="again"))["again"].facts.cache_hit == 2 * B


def test_swapped_weights_forget(make_engine: MakeEngine, adapters: dict[str, Path]) -> None:
    engine = make_engine(context=200)
    request = asking("r", prompt(2 * B + 1), adapter="policy", adapter_folder=adapters["a0"])
    run(engine, request)
    engine.swap_adapter("policy", adapters["a1"])
    swapped = run(engine, request)["r"]
    assert swapped.facts.cache_hit == 0
    assert equal(swapped, run(make_engine(context=200), replace(request, adapter_folder=adapters["a1"]))["r"])


@pytest.mark.parametrize(
    ("fields", "hit"),
    [
        pytest.param({"prompt_logprobs": True}, 0, id="all-of-the-prompt"),
        pytest.param({"prompt_logprobs": True, "prompt_logprobs_last_n": 5}, 2 * B, id="last-5"),
        pytest.param({"prompt_logprobs": True, "prompt_logprobs_last_n": B, "topk_prompt_logprobs": 2}, B, id="last-B"),
        pytest.param({"prompt_alt_tokens_k": 1}, 0, id="alternatives"),
    ],
)
def test_scored_positions_are_computed(make_engine: MakeEngine, fields: dict[str, object], hit: int) -> None:
    engine = make_engine(context=200)
    request = asking("r", prompt(2 * B + 9), **fields)
    run(engine, asking("before", request.prompt))
    result = run(engine, request)["r"]
    assert result.facts.cache_hit == hit
    assert equal(result, run(make_engine(context=200), request)["r"])


# -- steps


def test_a_long_prompt_does_not_stop_decoding(make_engine: MakeEngine) -> None:
    engine = make_engine(context=400, prefill_tokens=2 * B)
    engine.add(asking("running", prompt(3), sampling=replace(SHORT, max_tokens=50)))
    engine.step()
    engine.add(asking("long", prompt(8 * B)))
    for _ in range(3):
        before = engine.stats()
        engine.step()
        after = engine.stats()
        assert after.prefill_tokens - before.prefill_tokens == 2 * B
        assert after.slots_busy - before.slots_busy == 1
    cancelled = engine.cancel("long")
    assert cancelled is not None
    assert (cancelled.facts.prefill, cancelled.facts.sample) == (6 * B, 0)
    assert run(engine, asking("after", prompt(8 * B)))["after"].facts.cache_hit == 6 * B


def test_short_prompts_share_the_budget_that_a_long_one_leaves(make_engine: MakeEngine) -> None:
    engine = make_engine(context=400, prefill_tokens=3 * B)
    engine.add(asking("long", prompt(4 * B + 1)))
    engine.add(asking("short", prompt(7)))
    engine.step()
    assert engine.stats().prefill_tokens == 3 * B
    engine.step()
    assert engine.stats().prefill_tokens == 4 * B + 1 + 7


def test_a_small_pool_evicts_and_stays_right(make_engine: MakeEngine) -> None:
    block = 2 * 3 * 2 * 16 * B * 4  # k and v, layers, kv heads, head dim, float32
    engine = make_engine(context=200, prefix_bytes=3 * block)
    requests = [asking(f"r{i}", prompt(2 * B + i, seed=i % 3)) for i in range(9)]
    for request in requests:
        result = run(engine, request)[request.id]
        assert equal(result, run(make_engine(context=200, prefix_bytes=0), request)[request.id])


# -- the index


def tokens_of(*blocks: int) -> list[int]:
    return [block for block in blocks for _ in range(B)]


def add(index: BlockIndex, weights: int, *blocks: int) -> Chain:
    chain, _ = index.match(("", weights), tokens_of(*blocks), B * len(blocks))
    for _ in range(len(blocks) - len(chain.keys)):
        index.extend(chain, tokens_of(*blocks))
    return chain


def found(index: BlockIndex, weights: int, *blocks: int) -> int:
    return len(index.match(("", weights), tokens_of(*blocks), B * len(blocks))[1])


def test_least_recently_used_leaves_go_first() -> None:
    index = BlockIndex(4)
    add(index, 0, 1, 2, 3)
    add(index, 0, 1, 9)
    add(index, 0, 8)  # takes the place of 1-2-3's last block
    assert (found(index, 0, 1, 2, 3), found(index, 0, 1, 9), found(index, 0, 8)) == (2, 2, 1)
    index.use(index.match(("", 0), tokens_of(1, 2), 2 * B)[0])
    add(index, 0, 7)
    assert (found(index, 0, 1, 2), found(index, 0, 1, 9)) == (2, 1)


def test_a_chain_longer_than_the_pool_keeps_its_head() -> None:
    index = BlockIndex(2)
    add(index, 0, 1, 2, 3, 4)
    assert found(index, 0, 1, 2, 3, 4) == 2
    assert len(BlockIndex(0)) == found(BlockIndex(0), 0, 1) == 0


@given(st.lists(st.tuples(st.integers(-1, 0), st.lists(st.integers(0, 2), min_size=1, max_size=4)), max_size=40))
def test_no_place_is_used_twice_and_no_block_outlives_the_one_before(asked: list[tuple[int, list[int]]]) -> None:
    index = BlockIndex(5)
    for weights, blocks in asked:
        add(index, weights, *blocks)
        assert len(index) <= 5
        kept = index._blocks
        assert len({place for _, place in kept.values()}) == len(kept)
        ids = {id for id, _ in kept.values()} | {("", 0), ("", -1)}
        assert all(parent in ids for parent, _ in kept)


def test_prompts_differ_by_what_they_say() -> None:
    assert prompt(B) != prompt(B, seed=1)
    assert max(prompt(400)) < VOCAB
