"""Recurrent layers in the generator: whatever happens to a sequence's states, it gets the bits that it gets alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from weft.wire.binary.sample_codec import PolicySpan

from tests.workers.model import naive_fla
from tests.workers.model.models import ours, random_adapter, reference
from workers.generator import decoding, torch_engine
from workers.generator.cache.prefix_cache import BLOCK_TOKENS, PrefixCache
from workers.generator.engine import Finished, GenerateRequest, SamplingParams
from workers.generator.torch_engine import TorchEngine
from workers.model.adapters.adapter import load_adapter, save_adapter
from workers.model.decoder import Decoder
from workers.model.gpu import fla
from workers.model.lora.rows import LoraRows
from workers.model.parts.gated_delta import GatedDelta
from workers.model.parts.mamba2 import Mamba2
from workers.model.recur import Recurrence, State

from .conftest import run
from .test_engine_contract import prompt, same
from .test_policies import GrowingAttend, steps, swap

B = BLOCK_TOKENS
SAMPLED = SamplingParams(max_tokens=62, seed=4, stop_at_eos=False)


@pytest.fixture(scope="module", params=["qwen3-next", "nemotron-h"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A model whose states are as large as the keys and values of several blocks, as in published models."""
    delta = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    sizes = {"qwen3-next": delta, "nemotron-h": {"ssm_state_size": 64, "mamba_head_dim": 64}}[request.param]
    return ours(reference(request.param, vocab_size=97, **sizes), tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def requests(hybrid: Decoder, tmp_path_factory: pytest.TempPathFactory) -> list[GenerateRequest]:
    """Prompts that begin alike and end at and beyond a block, of two tenants' adapters and none, some with siblings."""
    folder = tmp_path_factory.mktemp("adapters")
    for rank, name in ((3, "a"), (5, "b")):
        save_adapter(random_adapter(hybrid, rank, rank), folder / name, base_model="tiny")
    kinds = [("", B), ("a", 2 * B), ("a", 2 * B + 5), ("b", 3 * B + 1), ("a", 2 * B), ("", 7)]
    return [
        GenerateRequest(
            f"r{n}", prompt(length, seed=1), SAMPLED, num_samples=1 + n % 3, adapter=name,
            adapter_folder=folder / name if name else None, prompt_logprobs=n == 3,
        )
        for n, (name, length) in enumerate(kinds)
    ]  # fmt: skip


def engine(hybrid: Decoder, **options: Any) -> TorchEngine:
    return TorchEngine(hybrid, (), context=160, **{"slots": 16, **options})


def alone(hybrid: Decoder, requests: list[GenerateRequest]) -> list[Finished]:
    return [run(engine(hybrid, prefix_bytes=0), request)[request.id] for request in requests]


def test_crowds_pieces_hits_and_being_set_aside_change_no_bit(hybrid: Decoder, requests: list[GenerateRequest]) -> None:
    wanted = alone(hybrid, requests)
    tight = engine(hybrid, slots=9, kv_tokens=13 * B, prefill_tokens=B)
    for id_of in ("{}", "again {}"):
        found = run(tight, *(replace(request, id=id_of.format(request.id)) for request in requests))
        assert all(same(a, found[id_of.format(a.id)]) for a in wanted)
    assert tight.stats().preempted > 0
    hits = [found[f"again {request.id}"].facts.cache_hit for request in requests]
    assert hits == [(len(request.prompt) - 1) // B * B if request.id != "r3" else 0 for request in requests]


def test_kernels_of_all_pieces_continue_from_the_same_states_and_keep_those_at_block_ends(
    hybrid: Decoder, requests: list[GenerateRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the formulas of fla-core's kernels in their place."""
    requests = [replace(request, sampling=replace(SAMPLED, max_tokens=12)) for request in requests]
    wanted = alone(hybrid, requests)
    naive_fla.CHUNKS.clear()
    monkeypatch.setattr(fla, "kernels", lambda: naive_fla.NAIVE)
    for layer in hybrid.modules():
        if isinstance(layer, GatedDelta | Mamba2):
            monkeypatch.setattr(layer, "packs", True)
            monkeypatch.setattr(layer, "run", None)
    tight = engine(hybrid, slots=9, kv_tokens=13 * B, prefill_tokens=3 * B)
    for id_of in ("{}", "again {}"):
        found = run(tight, *(replace(request, id=id_of.format(request.id)) for request in requests))
        for one in wanted:
            for mine, plain in zip(found[id_of.format(one.id)].sequences, one.sequences, strict=True):
                np.testing.assert_array_equal(mine.tokens, plain.tokens)
                np.testing.assert_allclose(mine.logprobs, plain.logprobs, atol=1e-4)
    assert {B} == naive_fla.CHUNKS, "a chunk is a block of a prompt"
    hits = [found[f"again {request.id}"].facts.cache_hit for request in requests]
    assert hits == [(len(request.prompt) - 1) // B * B if request.id != "r3" else 0 for request in requests]


def test_a_step_that_failed_is_repeated_from_the_same_states(
    hybrid: Decoder, requests: list[GenerateRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows are computed each alone, too."""
    monkeypatch.setattr(hybrid, "isolation", "per-segment")
    requests = [replace(request, sampling=replace(SAMPLED, max_tokens=20)) for request in requests[1:5]]
    wanted = alone(hybrid, requests)
    crowded, calls = engine(hybrid), 0
    draw = decoding.draw

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 5 == 0 and len(arguments[0]) > 3:  # a crowd's: what it has computed is in the pages already
            raise RuntimeError("no")
        return draw(*arguments)

    for module in (decoding, torch_engine):
        monkeypatch.setattr(module, "draw", failing)
    found = run(crowded, *requests)
    assert calls > 20
    assert all(same(a, found[a.id]) for a in wanted)


class Growing(GrowingAttend):
    """And states that other weights may have made."""

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[int, State] = {}

    def recur(self, layer: int, recurrence: Recurrence, x_TI: Tensor, *, apart: bool) -> Tensor:
        y_TO, self.states[layer] = recurrence.run(x_TI, self.states.get(layer))
        return y_TO


def test_after_a_swap_logprobs_are_the_new_weights_over_the_old_states(hybrid: Decoder, tmp_path: Path) -> None:
    for version in (3, 6):
        adapter = random_adapter(hybrid, 3, version)
        save_adapter(adapter, tmp_path / str(version), base_model="tiny", details={"step": version})
    request = GenerateRequest(
        "r", prompt(37, seed=1), replace(SAMPLED, max_tokens=20), adapter="inflight:mine",
        adapter_folder=tmp_path / "3", run="mine",
    )  # fmt: skip
    made = engine(hybrid)
    made.add(request)
    steps(made, 9)
    swap(made, tmp_path / "6")
    (sequence,) = run(made)["r"].sequences
    assert sequence.policy == (PolicySpan(3, 10), PolicySpan(6, 10))
    old, new = (load_adapter(tmp_path / version, hybrid.config).adapter for version in "36")
    tokens, attend, found = [*request.prompt, *sequence.tokens.tolist()], Growing(), []
    with torch.no_grad():
        for position, token in enumerate(tokens[:-1]):
            one = LoraRows([0, 1], [old if position < 37 + 9 else new])
            hidden_1D = hybrid(torch.tensor([token]), torch.tensor([position]), attend, one)
            logprobs_V = torch.log_softmax(hybrid.logits(hidden_1D, one)[0], -1)
            found.append(float(logprobs_V[tokens[position + 1]]))
    np.testing.assert_allclose(np.asarray(sequence.logprobs), found[36:], atol=1e-4)


def test_what_was_cancelled_goes_on_from_prompt_and_partial(hybrid: Decoder, requests: list[GenerateRequest]) -> None:
    greedy = SamplingParams(max_tokens=30, temperature=0, stop_at_eos=False)
    request = replace(requests[2], sampling=greedy, num_samples=1)
    whole = run(engine(hybrid), request)["r2"].sequences[0]
    made = engine(hybrid)
    made.add(request)
    steps(made, 12)
    partial = made.cancel("r2")
    assert partial is not None
    begun = partial.sequences[0].tokens.tolist()
    assert len(begun) > 5
    left = replace(greedy, max_tokens=30 - len(begun))
    rest = run(made, replace(request, id="rest", prompt=(*request.prompt, *begun), sampling=left))["rest"]
    assert rest.facts.cache_hit == 2 * B
    assert [*begun, *rest.sequences[0].tokens] == whole.tokens.tolist()


def test_states_take_at_most_half_of_the_prefix_caches_memory(hybrid: Decoder) -> None:
    """And are as far apart as they are large, but for the one from which the same prompt continues."""
    cache = engine(hybrid)._cache
    block = sum(pool[0].numel() * pool.element_size() for pool in cache.tensors)
    state = 5 * block // 2
    kept = PrefixCache(cache, 8 * state, state)
    assert (kept.capacity, PrefixCache(cache, 2 * state - 1, state).capacity) == (10, 0)
    assert kept.marks(8 * B, 0, 8 * B) == {3 * B, 6 * B, 7 * B}
    assert kept.marks(8 * B, 3 * B, 6 * B) == {6 * B}
    assert PrefixCache(cache, 2 * state - 1, state).marks(8 * B, 0, 8 * B) == set()


def test_what_a_request_holds_is_given_back(hybrid: Decoder, requests: list[GenerateRequest]) -> None:
    made = engine(hybrid)
    for request in requests:
        made.add(request)
    here = list(made._open.here.values())
    made.step()
    assert any(sequence.states for progress in here for sequence in progress.sequences)
    made.cancel("r1")
    while made.busy:
        made.step()
    assert not any(sequence.states for progress in here for sequence in progress.sequences)


def test_a_row_of_a_step_is_a_run_of_one_token(hybrid: Decoder) -> None:
    """The formula of one token against the chunks' of many."""
    layer: Any = hybrid.layers[0].attn
    x = torch.randn(5, layer.inputs.shape[0], generator=torch.Generator().manual_seed(0))
    start = layer.run(x[:4], None)[1]
    (y_run, after_run), (y_step, (after_step,)) = layer.run(x[4:], start), layer.step(x[4:], [start])
    torch.testing.assert_close(y_step, y_run, atol=1e-6, rtol=1e-5)
    for one, other in zip(after_run, after_step, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
