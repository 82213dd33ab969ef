"""Answers to samples: whichever replica takes one, it is settled once, and every replica has the result."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from api.state.fetched import Fetched
from api.who.principal import Principal
from scheduler.cluster import shared_journal
from scheduler.cluster.answers import SampleAnswers
from scheduler.cluster.stored import StoredOperations
from scheduler.journal.ending.results import FETCHED_LAST, Results
from scheduler.journal.rows import SMALL_BYTES, from_row, pack as pack_op
from scheduler.links import redis_queue
from scheduler.links.broadcasts import Broadcasts, Ended
from scheduler.links.contract import Answered, Item
from scheduler.links.large_results import INLINE_BYTES, pack
from scheduler.links.messages import Done
from scheduler.links.redis_queue import BATCH, RedisQueue
from scheduler.order.operations import Gone, Outcome
from store import tables
from store.blobs.contract import StoreAway
from store.blobs.folder import FolderBlobs
from store.database.db import Database
from tests.scheduler.cluster.replicas import RECORDED, Play, Replica, count, generator, sample, trainer
from tests.scheduler.journal.kit import create, run_row
from tests.waiting import until_async


def test_a_small_answer_to_what_was_accepted_here_is_not_looked_up_and_is_corrected_once(
    play: Play, blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = list[str]()
    rows = StoredOperations.all_queued

    def look(self: StoredOperations, op_ids: Any) -> Any:
        looked.extend(op_ids)
        return rows(self, op_ids)

    monkeypatch.setattr(StoredOperations, "all_queued", look)

    async def scenario(one: Replica, two: Replica) -> None:
        ids = [await one.journal.accept(sample(seq)) for seq in range(2)]
        await until_async(lambda: one.queue.known(ids) == set(ids))
        done = [Done(ids[0], b"tokens", {"prefill": 5, "sample": 4}), Done(ids[1], b"x" * 2000, {"sample": 4})]
        answers = [Answered(one_done.op_id, pack(one_done, blobs), 20, 1.0, "") for one_done in done]
        known = [one.journal.opened(request_id) for request_id in ids]
        settled = [await one.answers._queued(answers), await two.answers._queued(answers)]
        assert [found[ids[0]] is known[0] for found in settled] == [True, False]
        assert looked == [ids[1], *ids]
        looked.clear()
        packed = [dataclasses.replace(answer, op=pack_op(op)) for answer, op in zip(answers, known, strict=True)]  # type: ignore[arg-type]
        assert (await two.answers._queued(packed))[ids[0]].plan == known[0].plan  # type: ignore[union-attr]
        assert (await two.answers._queued([dataclasses.replace(packed[0], op=b"?")]))[ids[0]].id == ids[0]
        assert looked == [ids[1], ids[0]]
        ends = [await one.answers._settle(answers[0], found[ids[0]]) for found in settled]
        assert [(end.path, end.tokens) for end in ends if end is not None] == [(known[0].path, -11), ((), 0)]  # type: ignore[union-attr]
        assert (await two.result(ids[0])).payload == b"tokens"

    play(scenario)


@pytest.mark.parametrize("gone", [True, False])
def test_a_result_that_is_lost_or_damaged_on_its_way_is_sampled_again(
    play: Play, blobs: FolderBlobs, gone: bool
) -> None:
    async def scenario(one: Replica, two: Replica) -> None:
        request_id = await one.journal.accept(sample(0))
        answer = pack(Done(request_id, b"x" * 2 * INLINE_BYTES, {"sample": 4}), blobs)
        (ref,) = blobs.listed("handoff/*")
        blobs.delete(ref) if gone else blobs.path(ref).write_bytes(b"not what was written")
        op = one.journal.opened(request_id)
        assert await one.answers._settle(Answered(request_id, answer, 20, 1.0, ""), op) is not None, "it is forgotten"
        await one.lead()
        async with generator(one.broadcasts.url, blobs) as got:
            assert (await two.result(request_id)).payload == b"tokens"
        assert got == [request_id]

    play(scenario)


@pytest.mark.parametrize("large", [b"L" * (SMALL_BYTES + 1), b"L" * (INLINE_BYTES + 1), RECORDED], ids=len)
def test_a_result_that_cannot_be_stored_holds_up_none_that_lies_in_its_row(
    play: Play, url: str, blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch, large: bytes
) -> None:
    """The store for large results and recordings is away; where they were handed over, they can be read."""
    put, tried, there = blobs.put, list[str](), threading.Event()

    def away(ref: str, data: bytes) -> None:
        if ref.startswith(("results/", "stability/")) and not there.is_set():
            tried.append(ref)
            raise StoreAway("the server's object store does not answer (Unreachable)")
        put(ref, data)

    monkeypatch.setattr(blobs, "put", away)
    monkeypatch.setattr(redis_queue, "TAKEN_S", 0.2)  # both replicas try again and again

    async def scenario(one: Replica, two: Replica) -> None:
        ids = [await one.journal.accept(sample(seq)) for seq in range(6)]
        async with generator(url, blobs, [large, large]) as got:
            small = [await one.result(request_id) for request_id in ids[2:]]
            assert [outcome.payload for outcome in small] == [b"tokens"] * 4
            await until_async(lambda: one.queue.known(ids) == set(ids[:2]))
            await until_async(lambda: {ref.rpartition("/")[2].removesuffix(":0") for ref in tried} == set(ids[:2]))
            there.set()
            assert [(await one.result(request_id)).payload for request_id in ids[:2]] == [large] * 2
            await until_async(lambda: not one.queue.known(ids) and not blobs.listed("handoff/*"))
            assert got == ids

    play(scenario)


def test_a_leader_takes_answers_only_where_the_others_do_not_keep_up(url: str) -> None:
    queue = RedisQueue(url, "left to others")

    def answer(*names: str) -> None:
        queue.push_all(Item(name, ("m", "org", "interactive", "lane"), 10) for name in names)
        queue.answer_all((lease.id, lease.epoch, b"") for lease in queue.lease("w", ["m"], len(names), 60))

    async def scenario() -> None:
        journal: Any = SimpleNamespace(others=1, run=asyncio.to_thread)
        leader = SampleAnswers(journal, queue, journal, "leader", lambda: True)

        async def taken() -> list[str]:
            return [one.id for one in await leader._take()]

        assert queue.answered("other", 0.01) == []
        answer("a")
        await taken()
        assert [one.id for one in queue.answered("other", 0.01)] == ["a"]
        answer("b")
        assert await taken() == []  # another has taken something since
        assert await taken() == ["b"]  # and has not since
        many = [str(number) for number in range(BATCH + 1)]
        answer(*many)
        assert await taken() == many[:BATCH]
        assert await taken() == []
        journal.others = 0
        assert await taken() == many[BATCH:]

    asyncio.run(scenario())
    queue.close()


def test_an_answer_that_comes_twice_is_billed_once_and_counted_out_once(
    play: Play, blobs: FolderBlobs, postgres_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each replica has one more sample queued, by which one sees what is counted out too often."""

    async def scenario(one: Replica, two: Replica) -> None:
        for replica in (one, two):
            monkeypatch.setattr(replica.broadcasts, "ended", lambda ends: None)
        bodies = (b"1", b"22", b"", b"", b"x" * (SMALL_BYTES + 1))
        stay = [await replica.journal.accept(sample(seq, bodies[seq])) for seq, replica in enumerate((one, two))]
        ids = [await one.journal.accept(sample(seq, bodies[seq])) for seq in (2, 3, 4)]
        rows = await postgres_database.write(lambda session: [session.get_one(tables.Operation, id) for id in ids])
        dones = [Done(id, b"tokens", {"prefill": 5, "sample": 4}) for id in ids]
        elsewhere, twice, heard = [(from_row(row), done) for row, done in zip(rows, dones, strict=True)]
        assert await two.journal.end(*elsewhere)  # which was accepted by the other one
        assert not await one.journal.end(*elsewhere)
        assert await asyncio.gather(*(one.journal.end(*twice) for _ in range(2))) == [True, False]
        ending = asyncio.create_task(one.journal.end(*heard))
        await asyncio.sleep(0)
        one.journal.heard([Ended(heard[0].id, "org", heard[0].lane, 4, "sample", 6)], 0)
        assert await ending
        await one.journal.flush()
        assert [replica.journal._backlog.own() for replica in (one, two)] == [{"org": (1, 1)}, {"org": (1, 2)}]
        assert [list(replica.journal._open) for replica in (one, two)] == [[each] for each in stay]
        assert not blobs.exists(rows[2].body_ref)

    play(scenario)
    assert count(postgres_database, tables.UsageEvent) == 3 * 2


def test_who_waits_where_an_operation_is_settled_needs_no_broadcast(
    play: Play, url: str, blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_journal, "LOOK_AGAIN_S", 1e6)

    async def scenario(one: Replica, two: Replica) -> None:
        for replica in (one, two):
            monkeypatch.setattr(replica.broadcasts, "ended", lambda ends: None)
        await one.lead()
        async with trainer(url, blobs):
            request_id = await one.journal.accept(create(), run_row())
            assert isinstance(await one.result(request_id, 1e6), Outcome)

    play(scenario)


def test_lost_messages_only_delay(play: Play, url: str, blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_journal, "LOOK_AGAIN_S", 0.3)

    async def scenario(one: Replica, two: Replica) -> None:
        real = Broadcasts.ended
        for replica in (one, two):
            monkeypatch.setattr(replica.broadcasts, "ended", lambda end: None)
        request_id = await one.journal.accept(sample(0))
        async with generator(url, blobs):
            assert isinstance(await two.result(request_id), Outcome)
        assert one.journal._open.keys() | two.journal._open.keys() <= {request_id}
        for replica in (one, two):
            monkeypatch.setattr(replica.broadcasts, "ended", lambda end, replica=replica: real(replica.broadcasts, end))
        await until_async(lambda: not one.journal._open and not two.journal._open)
        await until_async(lambda: one.journal._backlog.of("org") == two.journal._backlog.of("org") == (0, 0))

    play(scenario)


def test_a_result_that_was_fetched_goes_for_all_replicas(
    play: Play, url: str, blobs: FolderBlobs, postgres_database: Database
) -> None:
    now = datetime.now(UTC)
    results = Results(postgres_database, blobs, 10**9, lambda: now + FETCHED_LAST + timedelta(minutes=1))

    async def scenario(one: Replica, two: Replica) -> None:
        async with generator(url, blobs):
            ids = [await one.journal.accept(sample(seq)) for seq in range(2)]
            for request_id in ids:
                assert (await two.result(request_id)).payload == b"tokens"
        fetched = Fetched(postgres_database, lambda: now)
        fetched.note(Principal("org", None), ids[:1])
        assert await fetched.flush() == 1
        assert await asyncio.to_thread(results.sweep) == 1
        for replica in (one, two):
            assert isinstance(await replica.result(ids[0]), Gone)
            assert (await replica.result(ids[1])).payload == b"tokens"

    play(scenario)
