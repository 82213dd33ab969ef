"""Steps are launched before the tokens of the previous step have come: tokens, logprobs, routes and bills are the same
as one step after the other. forward.decode computes here what a device would."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeForCausalLM
from weft.wire.binary.sample_codec import PolicySpan

import tests.workers.model.gpu_kit  # noqa: F401  (before the kernels)
from tests.workers.generator.conftest import EOS, run, spell
from tests.workers.generator.test_engine_contract import prompt, same
from tests.workers.generator.test_policies import steps, swap
from workers.generator import forward
from workers.generator.engine import Finished, GenerateRequest, SamplingParams
from workers.generator.gpu.ahead import Ahead, Flight
from workers.generator.tokens.sampling import Draw
from workers.generator.torch_engine import TorchEngine
from workers.model.adapters.adapter import load_adapter, save_adapter
from workers.model.base.weights import load_decoder
from workers.model.decoder import Decoder


class Launches:
    """Launches an engine's steps, and notes what happened in which order."""

    def __init__(self, made: TorchEngine, patch: pytest.MonkeyPatch) -> None:
        self.made, self.events, self.fails = made, [], lambda plan: False
        made._decoding.launch, made._decoding.ahead = self, Ahead(made._seating)
        wait = Flight.draws

        def draws(flight: Flight) -> list[Draw]:
            self.events.append("wait")
            return wait(flight)

        patch.setattr(Flight, "draws", draws)

    events: list[str]
    fails: Callable[[forward.DecodePlan], bool]

    def __call__(self, plan: forward.DecodePlan, after: Tensor | None = None) -> Tensor:
        if self.fails(plan):
            raise RuntimeError("no")
        self.events.append("launch" if after is None else "ahead")
        if after is None:
            return forward.decode(self.made._decoder, self.made._cache, plan)
        rows, plan.rows = plan.rows, plan.next_rows
        for sequence, token in zip(plan.sequences, after.tolist(), strict=True):
            assert not sequence.draft
            sequence.draft = [token]
        try:
            return forward.decode(self.made._decoder, self.made._cache, plan)
        finally:
            plan.rows = rows
            for sequence in plan.sequences:
                sequence.draft = []


def engine(decoder: Decoder, **options: Any) -> TorchEngine:
    return TorchEngine(decoder, EOS, decode_text=spell, **{"slots": 8, "context": 96} | options)


@pytest.fixture
def crowd(adapters: dict[str, Path]) -> list[GenerateRequest]:
    """Sequences that end by stop tokens, stop strings and length, with siblings, of several adapters, some with prompts
    that begin alike, at page ends, and with priorities."""
    names = ["", *adapters]
    return [
        GenerateRequest(
            f"r{i}",
            prompt(28 + i % 6, seed=i % 3),
            SamplingParams(
                max_tokens=2 + 5 * (i % 7), seed=i, temperature=0 if i % 5 == 4 else 1.0,
                stop_token_ids=(5, 9) if i % 3 == 0 else (), stop_strings=("<8>", "<3><4>") if i % 4 == 1 else (),
            ),
            num_samples=1 + i % 3,
            adapter=names[i % 5],
            adapter_folder=adapters.get(names[i % 5]),
            priority=i % 2,
            topk_sample_logprobs=i % 4,
            return_routed_experts=i % 6 == 2,
        )
        for i in range(16)
    ]  # fmt: skip


def assert_same(found: dict[str, Finished], wanted: dict[str, Finished]) -> None:
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        assert one.error is None
        assert same(found[name], one)
        assert found[name].facts.sample == one.facts.sample, "what is billed"
        for mine, plain in zip(found[name].sequences, one.sequences, strict=True):
            assert mine.stop_reason == plain.stop_reason
            assert (mine.routed_experts is None) == (plain.routed_experts is None)
            if mine.routed_experts is not None:
                np.testing.assert_array_equal(mine.routed_experts, plain.routed_experts)


@pytest.mark.parametrize("options", [{}, {"kv_tokens": 128}], ids=["by priority", "for pages"])
def test_a_crowd_gets_the_same_as_step_by_step(
    decoder: Decoder, crowd: list[GenerateRequest], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, made = engine(decoder, **options), engine(decoder, **options)
    used, found = Launches(made, monkeypatch), []
    crowd.sort(key=lambda request: request.priority)
    for each in (made, plain):
        for request in crowd[:8]:
            each.add(request)
        found.append(steps(each, 6) | run(each, *crowd[8:]))
    assert_same(*found)
    assert used.events.count("ahead") > 20
    assert made.stats().preempted > 0
    assert made.stats().sampled_tokens == plain.stats().sampled_tokens
    assert made.stats().slots_busy == plain.stats().slots_busy


def test_a_step_is_waited_for_once_and_the_next_is_launched_before(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(decoder)
    used = Launches(made, monkeypatch)
    endless = SamplingParams(max_tokens=12, stop_at_eos=False, seed=1)
    run(made, GenerateRequest("a", prompt(9), endless), GenerateRequest("b", prompt(30), endless))
    assert used.events == ["launch", "ahead", *["wait", "ahead"] * 9, "wait", "wait"]
    assert made.stats().decode_steps == 11


def test_a_launch_that_fails_changes_nothing(
    decoder: Decoder, crowd: list[GenerateRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, calls = engine(decoder), 0
    used = Launches(made, monkeypatch)

    def fails(plan: forward.DecodePlan) -> bool:
        """Every fifth launch of a crowd fails."""
        nonlocal calls
        calls += 1
        return calls % 5 == 0 and len({sequence.owner.number for sequence in plan.sequences}) > 1

    used.fails = fails
    assert_same(run(made, *crowd), run(engine(decoder), *crowd))


def test_what_was_drawn_for_a_cancelled_sequence_is_neither_told_nor_billed(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor for a request of the same name that comes at once."""
    endless = SamplingParams(max_tokens=40, stop_at_eos=False, seed=3)
    gone = GenerateRequest("gone", prompt(20, seed=8), endless)
    again = replace(gone, sampling=replace(endless, seed=4, max_tokens=9))
    others = [replace(gone, id=f"r{seed}", sampling=replace(endless, seed=seed)) for seed in range(4)]
    ends = []
    for ahead in (False, True):
        made = engine(decoder)
        if ahead:
            Launches(made, monkeypatch)
        for request in (gone, *others):
            made.add(request)
        early = {done.id: done for _ in range(6) for done in made.step()}
        assert (made._decoding.ahead is not None and made._decoding.ahead.flight is not None) == ahead
        cancelled = made.cancel("gone")
        assert cancelled is not None
        assert cancelled.facts.sample == len(cancelled.sequences[0].tokens) == 7
        ends.append((early | run(made, again), {"gone": cancelled}))
    for found, wanted in zip(ends[1], ends[0], strict=True):
        assert_same(found, wanted)


def test_a_drawn_token_is_not_taken_for_another_position(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for a sequence that has gone on, or back, without the step that is under way."""
    made = engine(decoder)
    Launches(made, monkeypatch)
    made.add(GenerateRequest("a", prompt(9), SamplingParams(max_tokens=40, stop_at_eos=False, seed=3)))
    for _ in range(4):
        made.step()
    assert made._decoding.ahead is not None
    flight = made._decoding.ahead.flight
    assert flight is not None
    tokens = flight.plan.sequences[0].tokens
    fits = [flight.fits(0)]
    for changed in ([*tokens, 5], tokens[:-1]):
        flight.plan.sequences[0].tokens = changed
        fits.append(flight.fits(0))
    assert fits == [True, False, False]


def test_a_sibling_starts_in_the_place_of_one_that_ended_in_a_step_under_way(
    decoder: Decoder, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That step was waited for because an adapter had been read meanwhile."""
    endless = SamplingParams(max_tokens=30, seed=1, stop_at_eos=False)
    request = GenerateRequest("a", prompt(20), endless, num_samples=2)
    tokens = run(engine(decoder, slots=1), request)["a"].sequences[0].tokens.tolist()
    last = next(at for at in range(3, len(tokens)) if tokens[at] not in tokens[:at])
    request = replace(request, sampling=replace(endless, stop_token_ids=(tokens[last],)))
    other = replace(request, id="b", num_samples=1, adapter="a0", adapter_folder=adapters["a0"])
    made = engine(decoder, slots=1)
    Launches(made, monkeypatch)
    made.add(request)
    while len(made.so_far("a")[0].tokens) < last:
        made.step()
    assert made._decoding.ahead is not None
    assert made._decoding.ahead.flight is not None
    made.add(other)
    assert made._adapters.flight is not None
    made._adapters.flight.found.result()
    assert_same(run(made), run(engine(decoder, slots=1), request, other))


def test_every_token_has_the_version_of_the_weights_that_drew_it(
    decoder: Decoder, adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that come while a step is under way draw from the next step on."""
    for version, name in ((3, "a0"), (6, "a1")):
        loaded = load_adapter(adapters[name], decoder.config).adapter
        save_adapter(loaded, tmp_path / str(version), base_model="tiny", details={"step": version})
    request = GenerateRequest(
        "r", prompt(37, seed=1), SamplingParams(max_tokens=20, seed=2, stop_at_eos=False), num_samples=2,
        adapter="inflight:mine", adapter_folder=tmp_path / "3", run="mine",
    )  # fmt: skip
    found = []
    for before in (9, 10):
        made = engine(decoder)
        if before == 9:
            Launches(made, monkeypatch)
        made.add(request)
        steps(made, before)
        swap(made, tmp_path / "6")
        found.append(run(made))
        policies = [sequence.policy for sequence in found[-1]["r"].sequences]
        assert policies == [(PolicySpan(3, 11), PolicySpan(6, 9))] * 2
    assert_same(*found)


def test_logits_that_are_not_finite_fail_their_request_alone(
    decoder: Decoder, crowd: list[GenerateRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(decoder)
    used = Launches(made, monkeypatch)
    plain = run(engine(decoder), *crowd[:6])
    calls = 0

    def spoilt(plan: forward.DecodePlan, after: Tensor | None = None) -> Tensor:
        nonlocal calls
        logits_RV, calls = used(plan, after), calls + 1
        owners = [row.owner.request.id for row in plan.rows]
        if calls >= 5 and "r4" in owners:
            logits_RV[owners.index("r4")] = math.nan
        return logits_RV

    made._decoding.launch = spoilt
    found = run(made, *crowd[:6])
    assert found.pop("r4").error is not None
    del plain["r4"]
    assert_same(found, plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_device_nothing_else_waits(reference: Qwen3MoeForCausalLM, tmp_path: Path) -> None:
    """A step in which nothing changes asks the device for nothing but its own tokens."""
    reference.save_pretrained(tmp_path)
    made = engine(load_decoder(tmp_path, torch.bfloat16, "cuda"))
    assert made._decoding.ahead is not None
    endless = SamplingParams(max_tokens=40, stop_at_eos=False, seed=1)
    for name in ("a", "b"):
        made.add(GenerateRequest(name, prompt(9), endless))
    for _ in range(6):
        made.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(6):
            made.step()
            assert made._decoding.ahead.flight is not None
    finally:
        torch.cuda.set_sync_debug_mode("default")
