"""Several generators at one desk: no slot is idle while anyone who fits it waits; one that dies loses no request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import update

from scheduler.dispatch.desks import LIVES
from scheduler.dispatch.replicas import REMEMBERED, Replica, choose, needed
from scheduler.journal.samplers import SamplerFacts
from scheduler.links.messages import Cancel, Declined, Done, Occupancy, PullSamples, SampleWork
from scheduler.links.sockets import WorkerLink
from scheduler.order.operations import Operation, Outcome
from scheduler.order.plans import Sample
from store import tables
from tests.scheduler.journal.test_journal import Service, go, organisation, sample

NOW = datetime.now(UTC)


def op(number: int, samples: int = 1, model: str = "m", org: str = "org") -> Operation:
    plan = Sample(samples, 0, "interactive")
    return Operation(f"op{number}", org, "s", "lane", number, "sample", model, 1, "", plan, NOW)


def replica(name: str, free: int, *models: str) -> Replica:
    made = Replica(name, None)  # type: ignore[arg-type]
    made.offer(models or ("m",), free)
    return made


# -- who gets it


def test_the_emptier_one_gets_it() -> None:
    a, b = replica("a", 8), replica("b", 8)
    a.take(op(0, samples=4), "x")
    assert choose([a, b], op(1), "y", "y") is b
    assert choose([b, a], op(1), "y", "y") is b


def test_of_near_equals_the_one_that_holds_the_adapter_gets_it() -> None:
    a, b = replica("a", 10), replica("b", 10)
    a.take(op(0), "x")
    assert choose([b, a], op(1), "x", "x") is a
    for number in range(2):
        a.take(op(2 + number), "x")
    assert choose([b, a], op(9), "x", "x") is b  # 0.3 fuller


def test_prompts_of_one_organisation_on_the_base_model_stay_together_and_weights_that_follow_a_run() -> None:
    base = SamplerFacts("acme", "m", "", None, inflight=False)
    snapshot = SamplerFacts("acme", "m", "weights/1", "run", inflight=False)
    follows = SamplerFacts("acme", "m", "weights/1", "run", inflight=True)
    assert [needed(op(0, org="acme"), sampler) for sampler in (base, snapshot, follows)] == ["acme", "weights/1", "run"]


def test_what_a_replica_has_declined_is_not_offered_to_it_again() -> None:
    a, b = replica("a", 9), replica("b", 1)
    a.decline("no such weights here", "op1")
    a.decline("no lm_head", "weights/x")
    assert choose([a, b], op(1), "y", "y") is b
    assert choose([a, b], op(2), "weights/x", "weights/x") is b
    assert choose([a, b], op(2), "y", "y") is a
    for number in range(REMEMBERED):
        a.decline("other", f"other{number}")
    assert a.declined("op1") is None


@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["m", "n", "mn"])), max_size=5),
    st.sampled_from("mn"),
    st.sampled_from(["", "x", "y"]),
)
def test_work_conserving(offers: list[tuple[int, str]], model: str, adapter: str) -> None:
    """Somebody gets it exactly when somebody with a free slot serves its model, whatever anyone holds."""
    replicas = [replica(str(i), free, *models) for i, (free, models) in enumerate(offers)]
    for one in replicas[::2]:
        one.take(op(100, samples=0), "x")
    able = [one for one in replicas if one.free > 0 and model in one.models]
    chosen = choose(replicas, op(1, model=model), adapter, adapter or "org")
    assert (chosen in able) if able else chosen is None


# -- at the desk


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  (what it looks at knows no events)
            await asyncio.sleep(0.005)


async def offer(service: Service, link: WorkerLink, slots: int) -> None:
    known = [r.free for r in service.generator._replicas]
    link.send(PullSamples(["m"], slots))
    await until(lambda: [r.free for r in service.generator._replicas] != known)


async def heard(link: WorkerLink) -> Any:
    return await asyncio.to_thread(link.recv, 5.0)


async def outcome(service: Service, request: str) -> Outcome:
    found = await service.journal.outcome("org", request, 5)
    assert isinstance(found, Outcome), found
    return found


def finish(link: WorkerLink, work: SampleWork) -> None:
    for sent in work.ops:
        link.send(Done(sent.op_id, b"text", {"prefill": 4, "cached_prefill": 4, "sample": 9}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    service = Service(tmp_path)
    organisation(service)
    service.database.write_now(lambda s: s.execute(update(tables.Sampler).values(run_id=None)))
    return tmp_path


def test_a_replica_that_dies_leaves_its_requests_to_the_others(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.generator) as survivor:
            async with service.worker(service.generator) as victim:
                await offer(service, survivor, 2)
                await offer(service, victim, 2)
                ids = [await service.journal.accept(sample(seq)) for seq in range(4)]
                first, lost = await heard(survivor), await heard(victim)
                assert len(first.ops) == len(lost.ops) == 1
            survivor.send(PullSamples(["m"], 100))
            more: SampleWork = await heard(survivor)
            assert sorted(o.op_id for o in [*first.ops, *more.ops]) == sorted(ids)
            finish(survivor, first)
            finish(survivor, more)
            assert [(await outcome(service, i)).payload for i in ids] == [b"text"] * 4
        assert sum(e.quantity for e in service.rows(tables.UsageEvent) if e.kind == "sample") == 4 * 9
        assert service.generator.stats["lost"] == 2

    go(scenario())


def test_a_request_that_kills_every_replica_is_given_up(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        request = await service.journal.accept(sample(0))
        for _ in range(LIVES):
            async with service.worker(service.generator) as link:
                link.send(PullSamples(["m"], 1))
                assert [o.op_id for o in (await heard(link)).ops] == [request]
        assert f"stopped {LIVES} times" in str((await outcome(service, request)).error)

    go(scenario())


def test_what_one_kind_declines_another_takes(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        service.generator._expected = 2
        async with service.worker(service.generator) as picky:
            await offer(service, picky, 9)
            first, second = [await service.journal.accept(sample(seq)) for seq in range(2)]
            for request in (first, second):
                assert [o.op_id for o in (await heard(picky)).ops] == [request]
                picky.send(Declined(request, "these weights train lm_head", adapter=True))
                picky.send(PullSamples(["m"], 9))
            await until(lambda: len(service.generator._aside) == 2)
            async with service.worker(service.generator) as other:  # the second of the two that were expected
                other.send(PullSamples(["m"], 9))
                work = await heard(other)
                assert [o.op_id for o in work.ops] == [first, second]
                finish(other, work)
                assert (await outcome(service, second)).payload == b"text"

    go(scenario())


def test_what_all_decline_fails_with_their_reason(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        service.generator._expected = 2
        async with AsyncExitStack() as stack:
            links = [await stack.enter_async_context(service.worker(service.generator)) for _ in range(2)]
            for link in links:
                await offer(service, link, 9)
            request = await service.journal.accept(sample(0))
            for link in links:
                await heard(link)
                link.send(Declined(request, "prompt_alt_tokens_k is not served by vLLM"))
            failed = await outcome(service, request)
            assert (failed.error, failed.category) == ("prompt_alt_tokens_k is not served by vLLM", "user")

    go(scenario())


def test_one_that_was_set_aside_can_be_cancelled(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        service.generator._expected = 2
        async with service.worker(service.generator) as link:
            link.send(PullSamples(["m"], 9))
            request = await service.journal.accept(sample(0))
            await heard(link)
            link.send(Declined(request, "not here"))
            await until(lambda: bool(service.generator._aside))
            assert service.journal.cancel("org", request)
            assert "cancelled" in str((await outcome(service, request)).error)
            assert service.generator._aside == []

    go(scenario())


def test_cancel_reaches_the_replica_that_runs_it(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.generator) as idle, service.worker(service.generator) as runs:
            await offer(service, runs, 9)
            request = await service.journal.accept(sample(0))
            await heard(runs)
            await offer(service, idle, 9)
            service.journal.cancel("org", request)
            assert await heard(runs) == Cancel(request)
            finish(runs, SampleWork([]))

    go(scenario())


def test_counts_of_each(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.generator) as a, service.worker(service.generator) as b:
            await until(lambda: len(service.generator._replicas) == 2)
            service.generator._replicas[1].name = "generator-2"
            a.send(Occupancy(3, 5, 12, 0.5))
            b.send(Occupancy(1, 4, 4, 0.25))
            await until(lambda: service.generator.stats["steps"] == 4)
            assert service.generator.stats["busy_s"] == 0.75
            assert service.generator.replicas() == {
                "generator": {"steps": 3, "slots_busy": 5, "slots_offered": 12, "held": 0},
                "generator-2": {"steps": 1, "slots_busy": 4, "slots_offered": 4, "held": 0},
            }

    go(scenario())
