"""Policies that move during sampling: which version drew a token, swaps between steps, and too old sequences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from weft.wire.binary.sample_codec import PolicySpan

from workers.generator.engine import Finished, GenerateRequest, SamplingParams
from workers.generator.torch_engine import TorchEngine
from workers.model.adapters.adapter import Adapter, load_adapter, save_adapter, version_of
from workers.model.adapters.shape import AdapterShape
from workers.model.attend import ALL, Reach
from workers.model.decoder import Decoder
from workers.model.lora.rows import LoraRows

from .conftest import run, until_read
from .test_engine_contract import ask, same

LONG = SamplingParams(max_tokens=40, seed=3, stop_at_eos=False)


@pytest.fixture(scope="module")
def versions(decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """One policy at several optimizer steps: version -> folder."""
    folders = {}
    for version in (3, 4, 6):
        adapter = Adapter.init(AdapterShape(decoder.config, 4), seed=0, scale=2.0)
        noise = torch.randn(adapter.flat.shape, generator=torch.Generator().manual_seed(version))
        adapter.flat.add_(noise, alpha=0.05)
        folders[version] = tmp_path_factory.mktemp("policy") / str(version)
        save_adapter(adapter, folders[version], base_model="tiny", details={"step": version})
    return folders


def make(decoder: Decoder, slots: int = 6, **options: int) -> TorchEngine:
    return TorchEngine(decoder, (), slots=slots, context=96, **options)


def follower(id: str, versions: dict[int, Path], length: int = 5, **fields: object) -> GenerateRequest:
    """A request to an inflight sampler of the run "mine", which is at version 3."""
    fields = {"sampling": LONG, "adapter": "inflight:mine", "adapter_folder": versions[3], "run": "mine", **fields}
    return ask(id, length, **fields)  # type: ignore[arg-type]


def steps(engine: TorchEngine, count: int) -> dict[str, Finished]:
    """What ends within so many steps, once all requested adapters have been read."""
    until_read(engine)
    return {finished.id: finished for _ in range(count) for finished in engine.step()}


def swap(engine: TorchEngine, folder: Path) -> None:
    engine.swap_adapter("inflight:mine", folder)
    until_read(engine)


def test_a_folder_tells_its_version(decoder: Decoder, versions: dict[int, Path], adapters: dict[str, Path]) -> None:
    loaded = [load_adapter(folder, decoder.config) for folder in (*versions.values(), adapters["a0"])]
    assert [version_of(each.details) for each in loaded] == [3, 4, 6, 0]


def test_every_token_is_labelled_with_the_version_that_drew_it(decoder: Decoder, versions: dict[int, Path]) -> None:
    engine = make(decoder)
    engine.add(follower("moves", versions))
    engine.add(ask("snapshot", 9, LONG, adapter="samplers/3", adapter_folder=versions[3], run="mine"))
    engine.add(ask("base", 4, LONG))
    steps(engine, 10)
    swap(engine, versions[4])
    engine.run_moved("mine", 4)
    steps(engine, 5)
    swap(engine, versions[6])
    finished = run(engine)
    (moved,) = finished["moves"].sequences
    assert moved.policy == (PolicySpan(3, 11), PolicySpan(4, 5), PolicySpan(6, 24))
    assert not moved.stale
    assert finished["snapshot"].sequences[0].policy == (PolicySpan(3, 40),)
    assert finished["base"].sequences[0].policy == (PolicySpan(0, 40),)
    for id in ("snapshot", "base"):
        again = ask(id, 9, LONG, adapter="a", adapter_folder=versions[3]) if id == "snapshot" else ask(id, 4, LONG)
        assert same(finished[id], run(make(decoder), again)[id])


def test_samples_that_start_from_an_older_prompt_begin_with_its_version(
    decoder: Decoder, versions: dict[int, Path]
) -> None:
    engine = make(decoder, slots=1)
    engine.add(follower("r", versions, num_samples=2, sampling=replace(LONG, max_tokens=4)))
    steps(engine, 2)
    swap(engine, versions[4])
    first, second = run(engine)["r"].sequences
    assert first.policy == (PolicySpan(3, 3), PolicySpan(4, 1))
    assert second.policy == (PolicySpan(3, 1), PolicySpan(4, 3))


class GrowingAttend:
    """Attention over keys and values that other weights may have made."""

    latent = False

    def __init__(self) -> None:
        self.k: dict[int, Tensor] = {}
        self.v: dict[int, Tensor] = {}

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, reach: Reach = ALL) -> Tensor:
        assert reach.all_of(1 << 20)
        before = (self.k.get(layer), self.v.get(layer))
        self.k[layer], self.v[layer] = (
            new if old is None else torch.cat((old, new)) for old, new in zip(before, (k_TKD, v_TKD), strict=True)
        )
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, self.k[layer], self.v[layer]))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return out[0].transpose(0, 1)


def test_after_a_swap_logprobs_are_the_new_weights_over_the_old_keys_and_values(
    decoder: Decoder, versions: dict[int, Path]
) -> None:
    engine = make(decoder)
    request = follower("r", versions, 37)
    engine.add(request)
    steps(engine, 9)
    swap(engine, versions[6])
    (sequence,) = run(engine)["r"].sequences
    assert sequence.policy == (PolicySpan(3, 10), PolicySpan(6, 30))
    old, new = (load_adapter(versions[version], decoder.config).adapter for version in (3, 6))
    tokens, at = [*request.prompt, *sequence.tokens.tolist()], 37 + 9  # keys of these positions are the old policy's
    attend = GrowingAttend()
    with torch.no_grad():
        for position in range(len(tokens) - 1):
            one = LoraRows([0, 1], [old if position < at else new])
            hidden_1D = decoder(torch.tensor([tokens[position]]), torch.tensor([position]), attend, one)
            if position < at:
                continue
            logprobs_V = torch.log_softmax(decoder.logits(hidden_1D, one)[0], -1)
            expected = float(logprobs_V[tokens[position + 1]])
            assert sequence.logprobs is not None
            assert float(sequence.logprobs[position + 1 - 37]) == pytest.approx(expected, abs=1e-4)


# -- staleness


def test_a_sequence_ends_when_its_run_has_moved_further_than_it_may(
    decoder: Decoder, versions: dict[int, Path]
) -> None:
    engine = make(decoder)
    strict, loose, free = (follower(f"most {m}", versions, max_staleness=m) for m in (0, 2, None))
    for request in (strict, loose, free):
        engine.add(request)
    before = steps(engine, 6)
    engine.run_moved("another", 99)
    engine.run_moved("mine", 3)
    assert not before
    engine.run_moved("mine", 4)
    stopped = steps(engine, 1)
    assert set(stopped) == {"most 0"}
    (cut,) = stopped["most 0"].sequences
    assert (len(cut.tokens), cut.stop_reason, cut.stale) == (7, "length", True)
    assert stopped["most 0"].facts.sample == 7
    engine.run_moved("mine", 6)
    rest = run(engine)
    assert rest["most 2"].sequences[0].stale
    assert not rest["most None"].sequences[0].stale
    whole = run(make(decoder), free)["most None"]
    assert same(rest["most None"], whole)
    np.testing.assert_array_equal(cut.tokens, whole.sequences[0].tokens[:7])
    assert engine.free_slots == 6
    assert not engine.busy


def test_the_oldest_token_counts_whatever_came_after_a_swap(decoder: Decoder, versions: dict[int, Path]) -> None:
    engine = make(decoder)
    engine.add(follower("old", versions, max_staleness=1))
    steps(engine, 3)
    swap(engine, versions[4])
    engine.run_moved("mine", 4)
    engine.add(follower("new", versions, max_staleness=1))
    steps(engine, 3)
    engine.run_moved("mine", 5)
    finished = run(engine)
    assert finished["old"].sequences[0].policy == (PolicySpan(3, 4), PolicySpan(4, 3))
    assert finished["old"].sequences[0].stale
    assert not finished["new"].sequences[0].stale


def test_samples_without_a_token_end_too_and_finished_ones_stay(decoder: Decoder, versions: dict[int, Path]) -> None:
    engine = make(decoder, slots=1)
    group = follower("group", versions, num_samples=3, max_staleness=0, sampling=replace(LONG, max_tokens=5))
    queued = follower("queued", versions, 40, max_staleness=0)
    engine.add(group)
    engine.add(queued)
    steps(engine, 6)
    engine.run_moved("mine", 4)
    finished = run(engine)
    first, second, third = finished["group"].sequences
    assert [len(s.tokens) for s in (first, second, third)] == [5, 3, 0]
    assert [s.stale for s in (first, second, third)] == [False, True, True]
    facts = finished["group"].facts
    assert (facts.prefill, facts.cached_prefill, facts.sample) == (5, 5, 8)
    assert finished["queued"].sequences[0].stale
    assert (finished["queued"].facts.prefill, finished["queued"].facts.sample) == (0, 0)
    assert engine.free_slots == 1


def test_what_is_too_old_in_the_middle_of_its_prompt_is_billed_for_that(
    decoder: Decoder, versions: dict[int, Path]
) -> None:
    engine = make(decoder, prefill_tokens=32)
    engine.add(follower("r", versions, 80, max_staleness=0))
    steps(engine, 2)
    engine.run_moved("mine", 4)
    (finished,) = steps(engine, 1).values()
    assert (finished.facts.prefill, finished.facts.sample) == (64, 0)
    assert not engine.busy


# -- going on


def test_what_was_cancelled_goes_on_from_prompt_and_partial(decoder: Decoder, adapters: dict[str, Path]) -> None:
    greedy = SamplingParams(max_tokens=30, temperature=0, stop_at_eos=False)
    request = ask("r", 50, greedy, adapter="a0", adapter_folder=adapters["a0"])
    whole = run(make(decoder), request)["r"].sequences[0]
    engine = make(decoder)
    engine.add(request)
    steps(engine, 12)
    partial = engine.cancel("r")
    assert partial is not None
    (begun,) = partial.sequences
    assert partial.facts.sample == len(begun.tokens) == 13
    longer = (*request.prompt, *begun.tokens.tolist())
    rest = run(engine, replace(request, prompt=longer, sampling=replace(greedy, max_tokens=17)))["r"]
    assert rest.facts.cache_hit == 32  # the whole blocks of the first prompt
    assert [*begun.tokens, *rest.sequences[0].tokens] == whole.tokens.tolist()
    both = np.concatenate((begun.logprobs, rest.sequences[0].logprobs))  # type: ignore[arg-type]
    np.testing.assert_allclose(both, whole.logprobs, atol=1e-4)  # type: ignore[arg-type]
