"""Room in the KV cache: short sequences take little of it, and setting others aside changes no bit of any result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from workers.generator.attention import decode_attend
from workers.generator.cache.kv_cache import KVCache
from workers.generator.engine import Finished, GenerateRequest, SamplingParams
from workers.generator.torch_engine import TorchEngine
from workers.model.decoder import Decoder

from .conftest import run, until_read
from .test_engine_contract import ask, same


def make(decoder: Decoder, slots: int = 8, context: int = 192, **options: int) -> TorchEngine:
    return TorchEngine(decoder, (), slots=slots, context=context, **options)


def crowd(adapters: dict[str, Path], count: int = 10) -> list[GenerateRequest]:
    """Requests of many lengths, adapters and group sizes."""
    requests = []
    for i in range(count):
        name = f"a{i % 5}" if i % 5 < 4 else ""
        sampling = SamplingParams(max_tokens=35 + 25 * (i % 4), seed=i, stop_at_eos=False)
        requests.append(
            ask(f"r{i}", 3 + 23 * (i % 4), sampling, num_samples=1 + i % 3, adapter=name,
                adapter_folder=adapters.get(name), priority=i % 2)
        )  # fmt: skip
    return requests


@pytest.mark.parametrize("path", ["native", pytest.param("torch", marks=pytest.mark.long)])
def test_preemption_changes_no_bit(
    decoder: Decoder, adapters: dict[str, Path], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "torch":
        monkeypatch.setattr(decode_attend, "library", lambda source: None)
    tight, roomy = make(decoder, kv_tokens=8 * 32, prefill_tokens=32), make(decoder, slots=32)
    together, apart = run(tight, *crowd(adapters)), run(roomy, *crowd(adapters))
    assert tight.stats().preempted >= 3
    assert roomy.stats().preempted == 0
    for id, finished in apart.items():
        assert finished.error is None
        assert same(finished, together[id]), id
        assert finished.facts == together[id].facts
    assert tight.stats().kv_tokens_used == roomy.stats().kv_tokens_used == 0


@pytest.mark.parametrize("way", ["take_out", "bring_in"])
def test_pages_that_cannot_be_copied_cost_their_own_request_alone(
    decoder: Decoder, adapters: dict[str, Path], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory to make room for a higher priority, or to grow: it is given out again, and others go on."""
    move, moves = getattr(KVCache, way), 0

    def short(*arguments: Any) -> Any:
        nonlocal moves
        moves += 1
        if moves % 3 == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return move(*arguments)

    apart = run(make(decoder, slots=32), *crowd(adapters, 6))
    monkeypatch.setattr(KVCache, way, short)
    engine = make(decoder, kv_tokens=8 * 32, prefill_tokens=32)
    together = run(engine, *crowd(adapters, 6))
    lost = {id: finished.error.elsewhere for id, finished in together.items() if finished.error is not None}
    assert moves > 0
    assert 0 < len(lost) <= 1 + moves // 3
    assert set(lost.values()) == {"again"}
    assert all(same(finished, apart[id]) for id, finished in together.items() if id not in lost)
    assert (engine.stats().kv_tokens_used, engine.stats().running, engine.free_slots) == (0, 0, 4)


def test_alone_and_in_a_tight_crowd_that_swaps_and_prefills_in_pieces(
    decoder: Decoder, adapters: dict[str, Path]
) -> None:
    """Everything at once, compared with the same request when it has the engine to itself."""
    request = ask("mine", 70, SamplingParams(max_tokens=60, seed=5, stop_at_eos=False), num_samples=2, adapter="a1",
                  adapter_folder=adapters["a1"])  # fmt: skip
    alone = run(make(decoder), request)["mine"]
    engine = make(decoder, kv_tokens=10 * 32, prefill_tokens=32)
    older = ask("older", 20, SamplingParams(max_tokens=150, seed=1, stop_at_eos=False), adapter="policy",
                adapter_folder=adapters["a0"])  # fmt: skip
    engine.add(older)
    engine.add(request)
    finished: dict[str, Finished] = {}
    for step in range(400):
        if step % 7 == 3:
            engine.swap_adapter("policy", adapters[f"a{step % 2}"])
        if step % 10 == 5 and step < 200:
            engine.add(replace(older, id=f"late {step}", sampling=SamplingParams(max_tokens=40, seed=step)))
        until_read(engine)
        finished |= {result.id: result for result in engine.step()}
        if not engine.busy:
            break
    assert engine.stats().preempted > 0
    assert same(finished["mine"], alone)


def test_the_lowest_priority_makes_way_and_then_the_youngest(decoder: Decoder) -> None:
    long = SamplingParams(max_tokens=120, seed=0, stop_at_eos=False)
    engine = make(decoder, slots=4, kv_tokens=9 * 32)
    for id, priority in (("old", 0), ("young", 0), ("first", 1)):
        engine.add(ask(id, 30, long, priority=priority))
    ended: list[str] = []
    while engine.busy:
        ended += [finished.id for finished in engine.step()]
    assert ended == ["first", "old", "young"]
    assert engine.stats().preempted >= 1


def test_a_higher_priority_starts_at_once_on_the_place_of_a_lower_one(decoder: Decoder) -> None:
    long = SamplingParams(max_tokens=60, seed=0, stop_at_eos=False)
    engine = make(decoder, slots=2)
    for id in ("a", "b"):
        engine.add(ask(id, 10, long))
    engine.step()
    engine.add(ask("same", 10, long))
    engine.add(ask("urgent", 10, replace(long, max_tokens=5), priority=1))
    ended = [finished.id for _ in range(5) for finished in engine.step()]
    assert ended == ["urgent"]
    assert engine.stats().preempted == 1
    finished = run(engine)
    assert set(finished) == {"a", "b", "same"}
    assert same(finished["b"], run(make(decoder), ask("b", 10, long))["b"])


def test_short_sequences_leave_room_for_many(decoder: Decoder) -> None:
    """Where five sequences of full length would fit, sixteen short ones run together."""
    engine = make(decoder, slots=16, kv_tokens=5 * 192 + 64)
    for i in range(16):
        engine.add(ask(f"r{i}", 10, SamplingParams(max_tokens=15, seed=i)))
    engine.step()
    assert engine.stats().running == 16
    run(engine)
    assert engine.stats().preempted == 0


def test_siblings_share_their_prompt(decoder: Decoder) -> None:
    engine = make(decoder, slots=8)
    engine.add(ask("group", 100, SamplingParams(max_tokens=4, stop_at_eos=False), num_samples=8))
    engine.step()
    assert engine.stats().running == 8
    assert engine.stats().kv_tokens_used == (3 + 8) * 32  # three whole pages of the prompt, and one for each sample


def test_free_slots_are_those_that_space_is_left_for(decoder: Decoder) -> None:
    engine = make(decoder, slots=16, kv_tokens=12 * 32)
    assert engine.free_slots == 6  # of two pages each
    engine.add(ask("a", 100, SamplingParams(max_tokens=60, stop_at_eos=False), num_samples=1))
    assert engine.free_slots == 4
    engine.step()
    assert engine.free_slots == 1  # as the present one takes four
    engine.cancel("a")
    assert engine.free_slots == 6


def test_cancelling_what_is_set_aside_frees_it(decoder: Decoder) -> None:
    long = SamplingParams(max_tokens=150, seed=0, stop_at_eos=False)
    engine = make(decoder, slots=4, kv_tokens=6 * 32)
    engine.add(ask("old", 30, long))
    engine.add(ask("young", 30, long))
    while not engine.stats().preempted:
        engine.step()
    assert engine.free_slots == 0
    partial = engine.cancel("young")
    assert partial is not None
    assert 30 < len(partial.sequences[0].tokens) < 150
    assert same(run(engine)["old"], run(make(decoder), ask("old", 30, long))["old"])


def test_five_hundred_in_flight(decoder: Decoder, adapters: dict[str, Path]) -> None:
    """All of them wait at once for 32 slots in little space; each gets the result that it gets alone."""
    requests = [
        ask(f"r{i}", 3 + i % 40, SamplingParams(max_tokens=2 + i % 3, seed=i, stop_at_eos=False),
            adapter=f"a{i % 4}", adapter_folder=adapters[f"a{i % 4}"], priority=i % 2)
        for i in range(500)
    ]  # fmt: skip
    engine = make(decoder, slots=32, kv_tokens=100 * 32)
    finished = run(engine, *requests, max_steps=20_000)
    assert len(finished) == 500
    assert all(result.error is None for result in finished.values())
    for request in requests[::60]:
        assert same(finished[request.id], run(make(decoder), request)[request.id])
