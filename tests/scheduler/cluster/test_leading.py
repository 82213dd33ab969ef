"""The replica that leads: what it takes up and hands to trainers, and how it stops, by choice or not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from sqlalchemy import update
from sqlalchemy.exc import OperationalError

from scheduler.cluster import policy_desk, term
from scheduler.cluster.term import Term
from scheduler.journal.rows import from_row
from scheduler.links.broadcasts import Accepted, Broadcasts
from scheduler.links.messages import Done, PolicyMoved, SetAside
from scheduler.links.policies import PolicyBoard
from scheduler.order.operations import NewOperation, Outcome, Waiting
from scheduler.order.plans import NewSampler
from store import tables
from store.blobs.folder import FolderBlobs
from store.database.db import Database
from tests.scheduler.cluster.replicas import LONG_AGO, Play, Replica, generator, sample, trainer
from tests.scheduler.journal.kit import RUN, create, run_row, train
from tests.waiting import until_async


@pytest.fixture
def board(url: str) -> Iterator[PolicyBoard]:
    made = PolicyBoard(url)
    yield made
    made.close()


def test_what_any_replica_accepts_is_trained_in_order_by_the_one_that_leads(
    play: Play, url: str, blobs: FolderBlobs
) -> None:
    async def scenario(one: Replica, two: Replica) -> None:
        await one.lead()
        ids = [await two.journal.accept(create(), run_row())]
        assert not await two.journal.cancel("org", ids[0])  # it is no sample
        refused = NewOperation("org", "s", RUN, 3, "forward_backward", "m", 10, b"bad", refused="too long")
        ids += [await two.journal.accept(train(2)), await one.journal.accept(train(1))]
        ids += [await one.journal.accept(train(4)), await two.journal.accept(refused)]
        async with trainer(url, blobs) as given:
            told = [await two.result(request_id) for request_id in ids]
            assert [outcome.error for outcome in told] == [None] * 4 + ["too long"]
            assert [await one.result(request_id) for request_id in ids] == told
        assert [seq for seq, _ in given] == [0, 1, 2, 4]

    play(scenario)


def test_the_leader_takes_what_it_hears_once_and_looks_up_what_it_does_not_know(
    play: Play, url: str, blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The carrier may report late, or again, what has ended long ago."""
    looked, heard = list[str](), list[Accepted]()
    rows, accepted = Term._rows, Broadcasts.accepted

    def look(self: Term, op_ids: list[str]) -> Any:
        looked.extend(op_ids)
        return rows(self, op_ids)

    def tell(self: Broadcasts, notes: Any) -> None:
        heard.extend(notes)
        accepted(self, notes)

    monkeypatch.setattr(Term, "_rows", look)
    monkeypatch.setattr(Broadcasts, "accepted", tell)
    monkeypatch.setattr(term, "RESCAN_S", 60)  # after the first look, which found nothing

    async def scenario(one: Replica, two: Replica) -> None:
        await one.lead()
        async with trainer(url, blobs) as given:
            ids = [await two.journal.accept(create(), run_row())]
            assert (await two.result(ids[0])).error is None
            looked.clear()
            ids += [await two.journal.accept(train(seq, body=b"{}")) for seq in (1, 2)]
            assert [(await two.result(request_id)).error for request_id in ids] == [None] * 3
            assert not set(ids) & set(looked)
            await asyncio.to_thread(accepted, two.broadcasts, [*heard, Accepted(ids[1]), Accepted(ids[2], packed=b"?")])
            ids.append(await two.journal.accept(train(3)))
            assert (await two.result(ids[3])).error is None
        assert {ids[1], ids[2]} <= set(looked)
        assert given == [(0, False), (1, False), (2, False), (3, False)]

    play(scenario)


def test_a_leader_takes_runs_up_and_breaks_them_without_waiting_for_the_database(play: Play, waited: list[str]) -> None:
    async def scenario(one: Replica, two: Replica) -> None:
        ids = [await two.journal.accept(create(), run_row()), await two.journal.accept(train(1))]
        await one.lead()
        term = one.leadership.term
        assert term is not None
        training = term.journal.training
        await until_async(lambda: RUN in training.runs)
        training.setbacks.set_aside(SetAside(RUN, "its weights are damaged", lasting=True))
        for request_id in (*ids, await two.journal.accept(train(2))):
            ended = await two.result(request_id)
            assert "its weights are damaged. It has no checkpoint: start it again" in ended.error

    play(scenario)
    assert sorted(set(waited)) == []


def test_a_leader_that_has_much_to_take_up_stays_the_leader_meanwhile(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = Term.begin

    async def long(self: Term) -> None:
        await asyncio.sleep(1.5 * tables.LEADS_S)
        await begin(self)

    monkeypatch.setattr(Term, "begin", long)

    async def scenario(one: Replica, two: Replica) -> None:
        await one.lead()
        first = one.leadership.term
        two.leadership.start()
        await until_async(lambda: first is not None and first._tasks)
        assert two.leadership.term is None
        assert one.leadership.term is first

    play(scenario)


def test_a_leader_goes_by_the_shares_of_organisations_as_they_are_now(
    play: Play, postgres_database: Database, url: str, blobs: FolderBlobs
) -> None:
    def share(weight: int) -> None:
        with_weight = update(tables.Organisation).where(tables.Organisation.id == "org").values(weight=weight)
        postgres_database.write_now(lambda session: session.execute(with_weight) and None)

    async def scenario(one: Replica, two: Replica) -> None:
        await one.lead()
        await asyncio.to_thread(share, 3)
        async with trainer(url, blobs):
            assert (await two.result(await two.journal.accept(create(), run_row()))).error is None
            term = one.leadership.term
            assert term is not None
            assert term.journal._weight("org") == 3
            await asyncio.to_thread(share, 5)
            await until_async(lambda: term.journal._weight("org") == 5)
        assert term.journal._weight("nobody") == 1

    play(scenario)


def test_a_replica_that_could_not_begin_to_lead_does_not_lead(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, tried = Term.begin, list[Term]()

    async def away(self: Term) -> None:
        tried.append(self)
        raise OperationalError("SELECT", {}, Exception("the connection is lost"))

    async def scenario(one: Replica, two: Replica) -> None:
        monkeypatch.setattr(Term, "begin", away)
        one.leadership.start()
        await until_async(lambda: tried)
        monkeypatch.setattr(Term, "begin", begin)
        async with asyncio.timeout(1):  # until its lease is over
            while one.leadership.term is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await until_async(lambda: one.leadership.term is not None)
        assert one.leadership.term is not tried[0]

    play(scenario)


def test_who_leads_knows_what_another_replica_told_of_a_failure_and_so_does_the_next(play: Play) -> None:
    """Whatever its client sends afterwards shows that the client knew; what it sent before shows nothing."""

    def knows(replica: Replica) -> int:
        term = replica.leadership.term
        return term.journal.training.runs[RUN].gradients.lacking(4, 0, None).knows if term else 0

    def there(replica: Replica) -> bool:
        term = replica.leadership.term
        return term is not None and RUN in term.journal.training.runs and term.journal.training.runs[RUN].next_seq == 4

    async def scenario(one: Replica, two: Replica) -> None:
        await one.lead()
        await two.journal.accept(create(), run_row())
        refused = NewOperation("org", "s", RUN, 1, "forward_backward", "m", 10, b"bad", refused="too long")
        bad = await two.journal.accept(refused)
        await two.journal.accept(train(2))
        await two.journal.tell_failure("another", bad)
        await two.journal.tell_failure("org", bad)
        await two.journal.accept(train(3))
        await until_async(lambda: there(one))
        assert not knows(one)  # the second was sent before, and has not ended
        one.leadership.term.journal.training.runs[RUN].gradients.over(2, LONG_AGO)  # type: ignore[union-attr]
        await until_async(lambda: knows(one) == 1)
        await one.leadership.stop(0.1)
        await two.lead()
        await until_async(lambda: there(two))
        assert not knows(two)
        two.leadership.term.journal.training.runs[RUN].gradients.over(2, LONG_AGO)  # type: ignore[union-attr]
        assert knows(two) == 1

    play(scenario)


def test_the_next_leader_replays_and_the_old_one_can_do_nothing_more(
    play: Play, url: str, blobs: FolderBlobs, postgres_database: Database
) -> None:
    async def scenario(one: Replica, two: Replica) -> None:
        await one.lead()
        async with trainer(url, blobs):
            first = [await one.journal.accept(create(), run_row()), await one.journal.accept(train(1))]
            for request_id in first:
                assert isinstance(await two.result(request_id), Outcome)
        old = one.leadership.term
        assert old is not None

        def usurp(session: Any) -> None:
            session.get_one(tables.JobLease, "journal").until = LONG_AGO

        await postgres_database.write(usurp)
        one.leadership._elections.cancel()  # type: ignore[union-attr]  # it is stopped, and does not notice
        await two.lead()
        pending = await two.journal.accept(train(2))
        await until_async(lambda: two.leadership.term.journal.training.opened(pending))  # type: ignore[union-attr]
        row = await postgres_database.write(lambda session: session.get_one(tables.Operation, pending))
        old.journal.training.enqueue(from_row(row))
        old.journal.training.finish(Done(pending, b"late", {"tokens": 10}))
        await old.journal.training.flush()
        assert isinstance(await two.result(pending, 0), Waiting)
        async with trainer(url, blobs) as given:
            assert (await two.result(pending)).payload == b"result"
        assert given[-3:] == [(0, True), (1, True), (2, False)]

    play(scenario)


def test_a_superseded_leader_waits_for_nothing_any_more(play: Play) -> None:
    def waits() -> bool:
        return any("Gaps" in str(task.get_coro()) for task in asyncio.all_tasks())

    async def scenario(one: Replica, two: Replica) -> None:
        await one.lead()
        assert isinstance(await one.journal.accept(create(), run_row()), str)
        await one.journal.accept(train(2))
        await until_async(waits)
        await one.leadership.stop(0.1)
        await until_async(lambda: not waits())

    play(scenario)


def test_how_far_runs_are_is_known_after_redis_and_the_leader_were_lost(
    play: Play, url: str, blobs: FolderBlobs, board: PolicyBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_desk, "LOOK_AGAIN_S", 0.2)

    def known() -> PolicyMoved | None:
        return board.known([RUN]).get(RUN)

    async def scenario(one: Replica, two: Replica) -> None:
        await one.lead()
        async with trainer(url, blobs):
            await two.journal.accept(create(), run_row())
            inflight = NewSampler("s:sample:7", 7, inflight=True)
            await one.journal.accept(train(1, "optim_step"))
            saved = await two.journal.accept(train(2, "save_sampler", b"", inflight))
            await until_async(lambda: known() == PolicyMoved(RUN, 1, f"weights/{saved}", 2))
            last = await one.journal.accept(train(3, "optim_step"))
            newest = PolicyMoved(RUN, 2, f"weights/{saved}", 3)
            await until_async(lambda: known() == newest)
            assert (await two.result(last)).error is None
            redis.Redis.from_url(url).flushall()
            await until_async(lambda: known() == newest)
        await one.leadership.stop(0.1)
        redis.Redis.from_url(url).flushall()
        await two.lead()
        await until_async(lambda: known() == newest)

    play(scenario)


def test_what_redis_forgets_is_queued_again_by_the_leader(play: Play, url: str, blobs: FolderBlobs) -> None:
    async def scenario(one: Replica, two: Replica) -> None:
        ids = [await two.journal.accept(sample(seq)) for seq in range(4)]
        ids.append(await two.journal.accept(create(), run_row()))
        await two.journal.flush()
        redis.Redis.from_url(url).flushall()
        await one.lead()
        async with generator(url, blobs), trainer(url, blobs):
            assert all([(await one.result(request_id)).error is None for request_id in ids])

    play(scenario)
