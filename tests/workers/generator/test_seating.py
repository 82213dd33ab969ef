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


LONG = SamplingParams(max_tokens=60, seed=0, stop_at_eos=False)


def flood(engine: TorchEngine, count: int, tenant: str = "flood", **more: Any) -> list[GenerateRequest]:
    requests = [ask(f"{tenant}{i}", 10, replace(LONG, seed=i), tenant=tenant, **more) for i in range(count)]
    for request in requests:
        engine.add(request)
    return requests


def test_a_tenant_without_rows_takes_one_of_whoever_has_most(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and without copying pages where these suffice; what was set aside goes on with the same bits."""
    monkeypatch.setattr(KVCache, "take_out", lambda *_: pytest.fail("pages were copied"))
    engine = make(decoder, slots=4)
    requests = [*flood(engine, 3, "many"), *flood(engine, 1, "one")]
    engine.step()
    assert (engine.free_slots, engine.yields) == (0, 2)
    chat = ask("chat", 10, replace(LONG, max_tokens=5), tenant="chat")
    engine.add(chat)
    assert engine.yields == 1
    ended = [finished.id for _ in range(5) for finished in engine.step()]
    assert ended == ["chat"]
    assert engine.stats().preempted == 1
    assert engine.stats().kv_tokens_used == 4 * 32
    finished = run(engine)
    assert engine.stats().preempted == 1
    for request in requests:
        assert same(finished[request.id], run(make(decoder), request)[request.id])


@pytest.mark.parametrize("tenant", ["flood", "other"])
def test_a_large_group_that_waits_leaves_room_for_tenants_without_rows(decoder: Decoder, tenant: str) -> None:
    """Whether of the tenant that has most rows, with a lower priority, or of another, which has its part of them."""
    engine = make(decoder, slots=8)
    flood(engine, 8, priority=1)
    engine.step()
    engine.add(ask("group", 10, LONG, num_samples=16, tenant=tenant))
    assert engine.yields > 0
    engine.step()
    assert engine.stats().waiting >= 12
    assert engine.yields > 0
    engine.add(ask("new", 10, replace(LONG, max_tokens=2), tenant="new"))
    assert [finished.id for finished in engine.step()] == ["new"]


def test_tenants_end_with_equally_many_rows_and_nobody_swaps_places_for_ever(decoder: Decoder) -> None:
    engine = make(decoder, slots=8)
    flood(engine, 8)
    engine.step()
    engine.add(ask("group", 10, LONG, num_samples=8, tenant="group"))
    flood(engine, 1, "third")
    for _ in range(20):
        engine.step()
    rows = [engine._seating.rows_of(tenant) for tenant in ("flood", "group", "third")]
    assert sorted(rows) == [1, 3, 4]
    preempted = engine.stats().preempted
    assert preempted <= 5
    assert len(run(engine)) == 10
    assert engine.stats().preempted == preempted


def test_priorities_order_the_work_of_one_tenant_alone(decoder: Decoder) -> None:
    """Where pages are short, too, another tenant's low priority is no reason to set its work aside."""
    engine = make(decoder, slots=4, kv_tokens=9 * 32)
    engine.add(ask("theirs", 30, replace(LONG, max_tokens=120), tenant="b", priority=0))
    for i in range(3):
        engine.add(ask(f"mine{i}", 30, replace(LONG, max_tokens=120), tenant="a", priority=1))
    theirs, steps = 0, 0
    while engine.busy:
        steps += 1
        if any(finished.id == "theirs" for finished in engine.step()):
            theirs = steps
    assert engine.stats().preempted > 0
    assert theirs == 119  # the first step draws two tokens


def test_one_without_room_lets_only_tenants_with_fewer_rows_go_first(decoder: Decoder) -> None:
    engine = make(decoder, slots=3)
    flood(engine, 3)
    engine.step()
    engine.add(ask("again", 10, replace(LONG, max_tokens=2), tenant="flood"))
    engine.add(ask("b", 10, replace(LONG, max_tokens=20), tenant="b"))
    engine.add(ask("c", 10, replace(LONG, max_tokens=3), tenant="c"))
    ended = [finished.id for _ in range(30) for finished in engine.step()]
    assert ended == ["c", "b"]


@pytest.mark.parametrize("slots", [3, 6])
def test_crowds_of_tenants_change_no_bit_and_all_end(decoder: Decoder, adapters: dict[str, Path], slots: int) -> None:
    """Short of rows and of pages at once, whoever comes when."""
    requests = [replace(request, tenant="abc"[i % 5 // 2]) for i, request in enumerate(crowd(adapters, 16))]
    engine, finished = make(decoder, slots=slots, kv_tokens=7 * 32, prefill_tokens=32), {}
    for step in range(4000):
        if step % 9 == 0 and step // 9 < len(requests):
            engine.add(requests[step // 9])
        until_read(engine)
        finished |= {result.id: result for result in engine.step()}
        if len(finished) == len(requests):
            break
    assert engine.stats().preempted > 3
    for request in requests:
        assert same(finished[request.id], run(make(decoder, slots=32), request)[request.id]), request.id
    assert engine.stats().kv_tokens_used == 0


def test_what_waits_and_may_set_nobody_aside_keeps_no_newcomer_out(decoder: Decoder) -> None:
    """More came than there were slots: offers cross what is handed out."""
    engine = make(decoder, slots=4)
    flood(engine, 8)
    engine.step()
    assert (engine.free_slots, engine.yields) == (0, 3)


def test_what_is_paused_can_be_cancelled(decoder: Decoder) -> None:
    engine = make(decoder, slots=2)
    flood(engine, 2)
    for _ in range(3):
        engine.step()
    flood(engine, 1, "new")
    engine.step()
    partial = engine.cancel("flood1")
    assert partial is not None
    assert len(partial.sequences[0].tokens) == 4
    assert set(run(engine)) == {"flood0", "new0"}
    assert (engine.stats().kv_tokens_used, engine.free_slots) == (0, 2)


def test_nobody_is_set_aside_for_one_that_does_not_fit_even_then(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the same pages would be copied out and in at every step."""
    monkeypatch.setattr(KVCache, "take_out", lambda *_: pytest.fail("pages were copied"))
    engine = make(decoder, slots=4, kv_tokens=10 * 32)
    engine.add(ask("long", 150, replace(LONG, max_tokens=30), tenant="flood"))
    flood(engine, 2)
    engine.step()
    engine.add(ask("large", 180, replace(LONG, max_tokens=2), tenant="new"))
    for _ in range(20):
        engine.step()
    assert engine.stats().preempted == 0
    assert engine.stats().running == 3


def test_prompts_are_computed_in_order_of_arrival_and_by_priority_within_a_tenant(decoder: Decoder) -> None:
    engine = make(decoder, slots=8, prefill_tokens=32)
    for name, priority in (("a1", 0), ("b1", 0), ("a2", 1), ("b2", 2), ("a3", 1)):
        engine.add(ask(name, 32, replace(LONG, max_tokens=1), tenant=name[0], priority=priority))
    ended = [finished.id for _ in range(9) for finished in engine.step()]
    assert ended == ["a2", "b2", "a3", "b1", "a1"]
