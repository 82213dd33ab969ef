"""Several generators at one desk: no slot is idle while a fitting sample waits; a death loses no request."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from sqlalchemy import update
from sqlalchemy.exc import OperationalError
from weft.wire.binary.sample_codec import decode_sample_response

from scheduler.dispatch.handing_out import Offer, announce, hand_out
from scheduler.journal.recovery import recover
from scheduler.journal.samples.samplers import SamplerFacts
from scheduler.journal.samples.sampling import needed
from scheduler.links.contract import LIVES, Item, Lease
from scheduler.links.messages import Cancel, Declined, Done, Drain, Occupancy, PullSamples, SampleWork
from scheduler.links.sockets import WorkerLink
from scheduler.order.local_queue import LocalQueue
from scheduler.order.operations import UNKEPT, Operation, Outcome
from scheduler.order.plans import Sample
from store import tables
from tests.scheduler.journal.kit import Service, go, organisation, sample
from tests.waiting import until_async

NOW = datetime.now(UTC)


class Room:
    """A queue, and workers with these free slots and models; notes what is handed out to whom."""

    def __init__(self, *offers: tuple[int, str]) -> None:
        self.queue = LocalQueue()
        self.offers = {str(place): Offer(str(place), list(models), free) for place, (free, models) in enumerate(offers)}
        self.slots: dict[str, int] = {}
        self.had: dict[str, str] = {}  # item: worker
        for offer in self.offers.values():
            announce(self.queue, offer)

    def push(self, name: str, adapter: str = "", slots: int = 1, model: str = "m") -> None:
        self.slots[name] = slots
        self.queue.push(Item(name, (model, "o", "interactive", "lane"), 1, slots=slots, adapter=adapter))

    def serve(self) -> dict[str, str]:
        def take(worker: str, lease: Lease) -> None:
            self.had[lease.id] = worker
            self.offers[worker].free -= self.slots[lease.id]
            self.offers[worker].busy += self.slots[lease.id]

        hand_out(self.queue, self.offers.values(), take)
        return self.had

    def give(self, name: str, adapter: str = "", slots: int = 1) -> str:
        self.push(name, adapter, slots)
        return self.serve()[name]


# -- which worker gets a sample


def test_the_emptier_one_gets_it() -> None:
    room = Room((8, "m"), (8, "m"))
    first = room.give("first", slots=4)
    assert room.give("second") != first


def test_what_comes_at_once_is_spread() -> None:
    room = Room((8, "m"), (8, "m"), (8, "m"))
    for number in range(12):
        room.push(f"i{number}")
    assert sorted(Counter(room.serve().values()).values()) == [4, 4, 4]


def test_of_near_equals_the_one_that_holds_the_adapter_gets_it() -> None:
    room = Room((10, "m"), (10, "m"))
    first = room.give("first", "x")
    assert [room.give("second", "x"), room.give("third", "x")] == [first, first]
    assert room.give("fourth", "x") != first  # 0.3 fuller


def test_prompts_of_one_organisation_on_the_base_model_stay_together_and_weights_that_follow_a_run() -> None:
    op = Operation("op", "acme", "s", "lane", 0, "sample", "m", 1, "", Sample(1, 0, "interactive"), NOW)
    base = SamplerFacts("acme", "m", "", None, inflight=False)
    snapshot = SamplerFacts("acme", "m", "weights/1", "run", inflight=False)
    follows = SamplerFacts("acme", "m", "weights/1", "run", inflight=True)
    assert [needed(op, sampler) for sampler in (base, snapshot, follows)] == ["acme", "weights/1", "run"]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["m", "n", "mn"])), max_size=5),
    st.lists(st.tuples(st.sampled_from("mn"), st.sampled_from(["", "x", "y"]), st.integers(1, 3)), max_size=20),
)
def test_no_slot_idles_while_a_sample_fits_it(offers: list[tuple[int, str]], items: list[tuple[str, str, int]]) -> None:
    """What still waits in the end is for models of which nobody has a free slot, whichever adapters they hold."""
    room = Room(*offers)
    for number, (model, adapter, slots) in enumerate(items):
        room.push(f"{model}{number}", adapter, slots, model)
        if number % 3 == 0:
            room.serve()
    had = room.serve()
    free = {model for offer in room.offers.values() if offer.free > 0 for model in offer.models}
    assert not free & {name[0] for name in room.slots.keys() - had.keys()}
    assert all(name[0] in room.offers[worker].models for name, worker in had.items())


# -- at the desk


async def offer(service: Service, link: WorkerLink, slots: int) -> None:
    def free() -> list[int]:
        return [generator.offer.free for generator in service.generator._generators.values()]

    known = free()
    link.send(PullSamples(["m"], slots))
    await until_async(lambda: free() != known)


def aside(service: Service) -> int:
    return len(service.journal.sample_queue._aside["m"])


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
        service.journal.sample_queue.expect(2)
        async with service.worker(service.generator) as picky:
            await offer(service, picky, 9)
            first, second = [await service.journal.accept(sample(seq)) for seq in range(2)]
            for request in (first, second):
                assert [o.op_id for o in (await heard(picky)).ops] == [request]
                picky.send(Declined(request, "these weights train lm_head", adapter=True))
                picky.send(PullSamples(["m"], 9))
            await until_async(lambda: aside(service) == 2)
            async with service.worker(service.generator) as other:  # the second of the two that were expected
                other.send(PullSamples(["m"], 9))
                work = await heard(other)
                assert [o.op_id for o in work.ops] == [first, second]
                finish(other, work)
                assert (await outcome(service, second)).payload == b"text"

    go(scenario())


def test_an_adapter_that_one_has_declined_is_not_offered_to_it_again(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        service.journal.sample_queue.expect(2)
        async with service.worker(service.generator) as picky, service.worker(service.generator) as other:
            await offer(service, picky, 9)
            first = await service.journal.accept(sample(0))
            await heard(picky)
            picky.send(Declined(first, "these weights train lm_head", adapter=True))
            await offer(service, other, 4)
            await heard(other)
            await offer(service, picky, 9)
            for seq in (1, 2):
                request = await service.journal.accept(sample(seq))
                assert [o.op_id for o in (await heard(other)).ops] == [request]
                await offer(service, other, 4 + seq)
            assert await asyncio.to_thread(picky.recv, 0.0) is None

    go(scenario())


def test_an_offer_that_was_taken_back_holds_nobody_up(folder: Path) -> None:
    """The engine of the generator that holds the adapter has lost its slots."""

    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.generator) as holds, service.worker(service.generator) as other:
            await offer(service, holds, 9)
            first = await service.journal.accept(sample(0))
            assert [o.op_id for o in (await heard(holds)).ops] == [first]
            await offer(service, other, 9)
            await offer(service, holds, 0)
            second = await service.journal.accept(sample(1))
            assert [o.op_id for o in (await heard(other)).ops] == [second]

    go(scenario())


def test_a_full_generator_gets_the_next_newcomer_when_the_first_has_ended(folder: Path) -> None:
    """No slot comes free by that, which would be offered: what was set aside takes it."""

    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.generator) as link:
            link.send(PullSamples(["m"], 0, 4))
            first, second = [await service.journal.accept(sample(number)) for number in range(2)]
            work = await heard(link)
            assert [o.op_id for o in work.ops] == [first]
            finish(link, work)
            assert [o.op_id for o in (await heard(link)).ops] == [second]

    go(scenario())


def test_what_only_a_generator_that_left_could_serve_fails_with_the_others_reasons(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.generator) as picky:
            await offer(service, picky, 2)
            declined = await service.journal.accept(sample(0))
            await heard(picky)
            async with service.worker(service.generator) as able:
                await offer(service, able, 2)
                await service.journal.accept(sample(1))
                await heard(able)  # and has no free slot
                picky.send(Declined(declined, "too long"))
                await until_async(lambda: aside(service) == 1)
            failed = await outcome(service, declined)
            assert (failed.error, failed.category) == ("too long", "user")

    go(scenario())


def test_a_database_that_is_away_for_a_moment_loses_no_sample(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        service = Service(folder)
        facts, calls = service.journal.samplers.facts, []

        def away_at_first(sampler_id: str) -> SamplerFacts:
            calls.append(sampler_id)
            if len(calls) == 1:
                raise OperationalError("SELECT", {}, Exception("disk I/O error"))
            return facts(sampler_id)

        monkeypatch.setattr(service.journal.samplers, "facts", away_at_first)
        async with service.worker(service.generator) as link:
            await offer(service, link, 2)
            request = await service.journal.accept(sample(0))
            work = await heard(link)
            assert [o.op_id for o in work.ops] == [request]
            finish(link, work)
            assert (await outcome(service, request)).payload == b"text"

    go(scenario())


def test_what_all_decline_fails_with_their_reason(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        service.journal.sample_queue.expect(2)
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
        service.journal.sample_queue.expect(2)
        async with service.worker(service.generator) as link:
            link.send(PullSamples(["m"], 9))
            request = await service.journal.accept(sample(0))
            await heard(link)
            link.send(Declined(request, "not here"))
            await until_async(lambda: aside(service) == 1)
            assert await service.journal.cancel("org", request)
            ended = await outcome(service, request)
            assert ended.error is None
            assert ended.payload is not None
            assert [len(each.tokens) for each in decode_sample_response(ended.payload).sequences] == [0, 0]
            assert aside(service) == 0

    go(scenario())


def test_cancel_reaches_the_replica_that_runs_it(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.generator) as idle, service.worker(service.generator) as runs:
            await offer(service, runs, 9)
            request = await service.journal.accept(sample(0))
            await heard(runs)
            await offer(service, idle, 9)
            await service.journal.cancel("org", request)
            assert await heard(runs) == Cancel(request)
            finish(runs, SampleWork([]))

    go(scenario())


def test_counts_of_each(folder: Path) -> None:
    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.generator) as a, service.worker(service.generator) as b:
            await until_async(lambda: len(service.generator._generators) == 2)
            list(service.generator._generators.values())[1].name = "generator-2"
            a.send(Occupancy(3, 5, 12, 0.5, 6, 4))
            b.send(Occupancy(1, 4, 4, 0.25))
            await until_async(lambda: service.generator.stats["steps"] == 4)
            assert service.generator.stats["busy_s"] == 0.75
            assert service.generator.replicas() == {
                "generator": {"steps": 3, "slots_busy": 5, "slots_offered": 12, "drafted": 6, "accepted": 4, "held": 0},
                "generator-2": {
                    "steps": 1,
                    "slots_busy": 4,
                    "slots_offered": 4,
                    "drafted": 0,
                    "accepted": 0,
                    "held": 0,
                },
            }

    go(scenario())


def test_what_only_its_connection_can_answer_ends_with_its_server(folder: Path) -> None:
    """If the server is stopped or killed, none of it is billed; what somebody may come back for goes on."""

    async def stopped() -> None:
        service = Service(folder)
        async with service.worker(service.generator) as link:
            await offer(service, link, 8)
            kept, unkept = [await service.journal.accept(sample(seq)) for seq in (UNKEPT - 1, UNKEPT)]
            work = [*(await heard(link)).ops, *(await heard(link)).ops]
            assert [op.op_id for op in work] == [kept, unkept]
            service.generator.drain()
            assert isinstance(await heard(link), Cancel)
            assert isinstance(await heard(link), Drain)
            finish(link, SampleWork(work))
            assert (await outcome(service, kept)).payload == b"text"
            assert "nothing is billed" in str((await outcome(service, unkept)).error)
        billed = {event.operation_id for event in service.rows(tables.UsageEvent)}
        assert billed == {kept}

    async def killed() -> None:
        service = Service(folder)
        kept, unkept = [await service.journal.accept(sample(seq)) for seq in (UNKEPT - 2, UNKEPT + 1)]
        service = Service(folder)
        recover(service.journal, service.database)
        assert "nothing is billed" in str((await outcome(service, unkept)).error)
        async with service.worker(service.generator) as link:
            link.send(PullSamples(["m"], 8))
            assert [op.op_id for op in (await heard(link)).ops] == [kept]

    go(stopped())
    go(killed())
