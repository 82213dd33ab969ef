"""The contract of every engine, on real vLLM: the very tests of test_engine_contract.py, and those of them that count
steps of an engine, which vLLM does not show, said in terms of time.

What vLLM computes depends in its last bits on who shares a batch, so equal means equal tokens, and logprobs to 1e-4.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.workers.generator import test_engine_contract as contract
from tests.workers.generator.conftest import EOS, spell
from tests.workers.generator.test_engine_contract import GREEDY, NO_STOP, ask
from workers.generator.engine import Finished, GenerateRequest, SamplingParams
from workers.generator.vllm.engine import VllmEngine
from workers.generator.vllm.server import VllmServer
from workers.model.families.read import read_config
from workers.model.tiny import TINY_PATH

from .conftest import LIMITS, MakeEngine

pytestmark = pytest.mark.vllm

#: They look at single steps, or say how much a step computes, or sample at a temperature that vLLM refuses, or know how
#: small the other engines' model is, or go on with a seed, which vLLM begins anew in each request; their like is below
#: and in test_engine.py, or it is vLLM's own affair.
NOT_LIKE_THIS = {
    "test_a_bad_request_fails_alone",
    "test_prompt_logprobs_come_when_asked",
    "test_eos_ends_and_is_kept_unless_turned_off",
    "test_a_long_queue_of_prompts_does_not_stop_decoding",
    "test_cancel_gives_the_tokens_so_far",
    "test_free_slots_count_what_waits",
    "test_a_tenant_without_slots_does_not_wait_for_one_that_holds_all",
    "test_a_resumed_sample_goes_on_as_the_first_would_have",
    "test_many_one_token_samples_through_one_slot",
    "test_swap_takes_effect_while_others_keep_generating",
}

for _name, _test in vars(contract).items():
    if _name.startswith("test_") and _name not in NOT_LIKE_THIS:
        globals()[_name] = _test


def alike(a: Finished, b: Finished) -> bool:
    pairs = list(zip(a.sequences, b.sequences, strict=True))
    return all(np.array_equal(x.tokens, y.tokens) and x.stop_reason == y.stop_reason for x, y in pairs) and all(
        np.allclose(x.logprobs, y.logprobs, atol=1e-4) for x, y in pairs
    )


def finish(engine: VllmEngine, *requests: GenerateRequest) -> dict[str, Finished]:
    for request in requests:
        engine.add(request)
    finished: dict[str, Finished] = {}
    deadline = time.monotonic() + 270  # vLLM may be starting anew
    while engine.busy:
        assert time.monotonic() < deadline, engine.stats()
        for result in engine.step():
            assert result.id not in finished
            finished[result.id] = result
    return finished


@pytest.fixture(autouse=True)
def by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "same", alike)
    monkeypatch.setattr(contract, "run", finish)


@pytest.fixture
def make_engine(engine: VllmEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeEngine]:
    engines: list[VllmEngine] = []

    async def warm_already(server: VllmServer) -> None:
        """`engine` has warmed the one server up."""

    monkeypatch.setattr(VllmServer, "_warm_up", warm_already)

    def make(*, slots: int = 8, context: int = 96, eos: tuple[int, ...] = EOS) -> VllmEngine:
        folder, config = tmp_path / f"engine{len(engines)}", read_config("tiny", TINY_PATH)
        made = VllmEngine(
            config, eos, slots=slots, context=context, limits=LIMITS, folder=folder, url=engine.url, decode_text=spell
        )
        engines.append(made)
        made.wait_ready(60)
        return made

    yield make
    for made in engines:
        made.close()


LONG = SamplingParams(max_tokens=150, seed=3, stop_at_eos=False)


def test_free_slots_count_what_waits(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=4, context=200)
    assert engine.free_slots == 4
    engine.add(ask("a", sampling=LONG, num_samples=3))
    assert engine.free_slots == 1
    engine.add(ask("b", sampling=LONG, num_samples=3))
    assert engine.free_slots == 0
    finish(engine)
    assert engine.free_slots == 4
    assert not engine.busy


def test_a_tenant_without_slots_does_not_wait_for_one_that_holds_all(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=4, context=200)
    assert (engine.free_slots, engine.yields) == (4, 1)
    engine.add(ask("flood", sampling=LONG, num_samples=6, tenant="a"))
    engine.add(ask("new", sampling=replace(LONG, max_tokens=2), tenant="b"))
    assert (engine.free_slots, engine.yields) == (0, 0)
    ended = list[str]()
    while engine.busy:
        ended += [finished.id for finished in engine.step()]
    assert ended == ["new", "flood"]
    assert (engine.free_slots, engine.yields) == (4, 1)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"prompt": ()}, "empty"),
        ({"prompt": (1560,)}, "vocabulary"),
        ({"num_samples": 0}, "num_samples"),
        ({"sampling": SamplingParams(max_tokens=-1)}, "max_tokens"),
        ({"adapter": "gone", "adapter_folder": Path("nowhere")}, "gone"),
    ],
)
def test_a_bad_request_fails_alone(make_engine: MakeEngine, fields: dict[str, object], word: str) -> None:
    good = ask("good", sampling=replace(NO_STOP, seed=0))
    finished = finish(make_engine(), good, replace(ask("bad"), **fields))  # type: ignore[arg-type]
    error = finished["bad"].error
    assert error is not None
    assert error.category == "user"
    assert word in error.message
    assert len(finished["good"].sequences[0].tokens) == 12


def test_eos_ends_and_is_kept_unless_turned_off(make_engine: MakeEngine) -> None:
    sampling = SamplingParams(max_tokens=90, seed=2)
    request = ask("free", sampling=replace(sampling, stop_at_eos=False), num_samples=20)
    free = finish(make_engine(slots=20), request)["free"].sequences
    eos = tuple({int(sequence.tokens[10]) for sequence in free[:2]})
    engine = make_engine(slots=20, eos=eos)
    stopped = finish(engine, replace(request, id="stopped", sampling=sampling))["stopped"].sequences
    assert any(sequence.stop_reason == "stop" for sequence in stopped)
    for short, full in zip(stopped, free, strict=True):
        at = [i for i, token in enumerate(full.tokens) if token in eos]
        assert short.tokens.tolist() == full.tokens.tolist()[: at[0] + 1 if at else 90]
        assert short.stop_reason == ("stop" if at else "length")
        assert len(short.logprobs) == len(short.tokens)


def test_many_one_token_samples_through_one_slot(make_engine: MakeEngine) -> None:
    request = ask("r", 4, SamplingParams(max_tokens=1, seed=0), num_samples=60)
    assert len(finish(make_engine(slots=1), request)["r"].sequences) == 60


def test_cancel_gives_the_tokens_so_far(make_engine: MakeEngine) -> None:
    request = ask("r", sampling=LONG, num_samples=3)
    engine = make_engine(slots=2, context=200)
    whole = finish(engine, request)["r"]
    for _ in range(20):  # until it falls before the first has ended
        engine.add(request)
        time.sleep(0.02)
        partial = engine.cancel("r")
        assert partial is not None
        lengths = [len(sequence.tokens) for sequence in partial.sequences]
        if lengths[0] < 150:
            break
    assert lengths[0] < 150
    assert lengths[2] == 0
    assert partial.facts.sample == sum(lengths)
    for sequence, full in zip(partial.sequences, whole.sequences, strict=True):
        assert sequence.tokens.tolist() == full.tokens.tolist()[: len(sequence.tokens)]
        assert sequence.stop_reason == "length"
    assert engine.free_slots == 2
    assert not engine.busy


def test_swap_takes_effect_while_others_keep_generating(make_engine: MakeEngine, adapters: dict[str, Path]) -> None:
    long = replace(GREEDY, max_tokens=180)
    swapped = ask("swapped", sampling=long, adapter="policy", adapter_folder=adapters["a0"])
    other = ask("other", 9, long, adapter="a2", adapter_folder=adapters["a2"])
    engine = make_engine(context=200)
    finish(engine, replace(swapped, id="loads"), replace(other, id="loads too"))
    began = time.monotonic()
    before = finish(engine, swapped)["swapped"].sequences[0].tokens.tolist()
    took_s = time.monotonic() - began
    for share in 5 * (0.3, 0.1, 0.6, 0.03, 0.9):  # the swap must come after its first token and before its last
        began = time.monotonic()
        for request in (swapped, other):
            engine.add(request)
        time.sleep(share * took_s)
        engine.swap_adapter("policy", adapters["a1"])
        finished = finish(engine)
        took_s = time.monotonic() - began  # of a machine that is busy as it is now
        sequence = finished["swapped"].sequences[0]
        if len(sequence.policy) == 2:
            break
        engine.swap_adapter("policy", adapters["a0"])
    assert [span.version for span in sequence.policy] == [0, 1]
    kept = sequence.policy[0].length
    assert sequence.policy[1].length == 180 - kept
    assert sequence.tokens.tolist()[:kept] == before[:kept]
    assert sequence.tokens.tolist() != before
    alone = finish(make_engine(context=200), other)["other"]
    assert alike(finished["other"], alone)
    assert [span.version for span in finished["other"].sequences[0].policy] == [2]
    renamed = replace(swapped, id="renamed", adapter="fresh", adapter_folder=adapters["a1"])
    now = finish(engine, swapped, renamed)
    assert alike(now["swapped"], now["renamed"])
    assert [span.version for span in now["swapped"].sequences[0].policy] == [1]


def test_max_staleness_stops_what_has_become_too_old(make_engine: MakeEngine, adapters: dict[str, Path]) -> None:
    engine = make_engine(context=200)
    request = ask("r", sampling=LONG, adapter="policy", adapter_folder=adapters["a1"], run="run", max_staleness=2)
    engine.add(request)
    other = replace(request, id="other", run="other")
    engine.add(other)
    engine.run_moved("run", 3)
    engine.run_moved("run", 4)  # whether it has begun by now or not
    finished = finish(engine)
    assert finished["r"].sequences[0].stale
    assert len(finished["r"].sequences[0].tokens) < 150
    assert finished["r"].facts.sample == len(finished["r"].sequences[0].tokens)
    assert not finished["other"].sequences[0].stale
    assert len(finished["other"].sequences[0].tokens) == 150


def test_a_prompt_that_came_before_is_a_cache_hit_for_its_tenant_alone(make_engine: MakeEngine) -> None:
    engine = make_engine(context=200)
    request = ask("r", 180, replace(NO_STOP, max_tokens=2), tenant="one")
    assert finish(engine, request)["r"].facts.cache_hit == 0
    assert finish(engine, request)["r"].facts.cache_hit >= 64
    assert finish(engine, replace(request, tenant="two"))["r"].facts.cache_hit == 0
