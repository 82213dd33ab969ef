"""Two replicas accept operations of the same runs and samplers, and tell what these wait for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis
from msgspec.structs import replace
from sqlalchemy import update
from sqlalchemy.exc import IntegrityError, NoResultFound

from api.state.rates import check_in_flight
from api.who.principal import RateLimit
from scheduler.cluster import shared_limits
from scheduler.cluster.shared_limits import BacklogBoard
from scheduler.journal.accepting.acceptance import Taking
from scheduler.journal.samples.samplers import SamplerFacts
from scheduler.links import loading
from scheduler.links.contract import Item
from scheduler.links.loading import Loading, announced
from scheduler.order import presence
from scheduler.order.operations import Draining, NewOperation, Outcome, QueueFull, RunClosed, SequenceReused, Waiting
from store import tables
from store.blobs.folder import FolderBlobs
from store.database.db import Database
from tests.scheduler.cluster.replicas import Play, Replica, count, generator, sample, trainer
from tests.scheduler.journal.kit import RUN, create, run_row, train
from tests.waiting import until_async


def test_one_operation_sent_to_both_replicas_at_once_is_one(
    play: Play, url: str, blobs: FolderBlobs, postgres_database: Database
) -> None:
    async def scenario(one: Replica, two: Replica) -> None:
        async with generator(url, blobs) as got:
            for seq in range(5):
                ids = await asyncio.gather(*(r.journal.accept(sample(seq)) for r in (one, two, one, two)))
                assert len(set(ids)) == 1
                outcomes = await asyncio.gather(one.result(ids[0]), two.result(ids[0]))
                assert [outcome.payload for outcome in outcomes] == [b"tokens"] * 2
            assert len(got) == len(set(got)) == 5
        with pytest.raises(SequenceReused):
            await two.journal.accept(NewOperation("org", "s", "s:sample:0", 0, "sample", "m", 20, b"other"))
        assert not one.journal._open
        assert not two.journal._open

    play(scenario)
    assert count(postgres_database, tables.Operation) == 5


def test_a_repeat_is_the_operation_that_is_there_and_not_one_that_comes_too_late(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two arrive here while another replica accepts the same operation, so one is inserted in vain. The other waited
    for that one, and failed with it."""

    async def scenario(one: Replica, two: Replica) -> None:
        first = await two.journal.accept(sample(0))
        acceptance = one.journal._admission._acceptance
        write = acceptance._write

        async def slowly(taking: Taking) -> None:
            await asyncio.sleep(1)
            await write(taking)

        monkeypatch.setattr(acceptance, "_write", slowly)
        asked = asyncio.create_task(acceptance.known(sample(0), maybe_stored=True))
        await asyncio.sleep(0)
        late = asyncio.create_task(acceptance.take(sample(0), ()))
        assert await asked == first
        with pytest.raises(IntegrityError):
            await late

    play(scenario)


def test_no_replica_waits_for_the_database_in_its_event_loop(
    play: Play, url: str, blobs: FolderBlobs, waited: list[str]
) -> None:
    async def accepted(replica: Replica, new: NewOperation, *rows: tables.Base) -> str:
        assert not await replica.journal.taken(new.lane, new.seq)
        return await replica.journal.accept(new, *rows)

    async def scenario(one: Replica, two: Replica) -> None:
        await one.lead()
        limits = [RateLimit("organisation", "org", None, None, 9), RateLimit("key", "7", None, None, 9)]
        async with trainer(url, blobs):
            for new, rows in (create(), (run_row(),)), (train(1), ()):
                await check_in_flight(limits, two.journal.in_flight, new)
                request_id = await accepted(two, new, *rows)
                assert (await one.result(request_id)).error is None
                two.journal.answers.clear()
                assert await two.journal.taken(new.lane, new.seq)
                assert await two.journal.accept(new) == request_id
        async with generator(url, blobs):
            for replica, other in ((one, two), (two, one)):
                for samples in replica.journal.samplers, other.journal.samplers:
                    samples._known.clear()
                begin = 0 if replica is one else 5
                ids = [await accepted(replica, sample(seq)) for seq in range(begin, begin + 5)]
                assert {(await other.result(request_id)).payload for request_id in ids} == {b"tokens"}
        assert await one.journal.cancel("org", "none") is False
        assert await one.journal.working_sessions() == set()
        assert (await one.journal.queue_lengths())["open"] == 0

    play(scenario)
    assert sorted(set(waited)) == []


def test_whatever_redis_refuses_once_the_loops_of_a_replica_go_on(
    play: Play, url: str, blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = list[str]()

    def once(whose: Any, name: str) -> None:
        call = getattr(whose, name)

        def refuse(*arguments: Any) -> Any:
            if name in refused:
                return call(*arguments)
            refused.append(name)
            raise redis.ResponseError("NOPERM this user has no permissions to run the command")

        monkeypatch.setattr(whose, name, refuse)

    async def scenario(one: Replica, two: Replica) -> None:
        await one.lead()
        for replica in (one, two):
            once(replica.queue, "settle")
            once(replica.board, "exchange")
        await until_async(lambda: "exchange" in refused)
        async with generator(url, blobs):
            for seq in range(3):
                assert isinstance(await one.result(await one.journal.accept(sample(seq))), Outcome)
            await until_async(lambda: "settle" in refused)
        await until_async(lambda: one.journal.others == two.journal.others == 1)

    play(scenario)


def test_a_sample_whose_sampler_is_gone_holds_up_no_other(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(one: Replica, two: Replica) -> None:
        there = one.journal.samplers.facts

        def facts(sampler_id: str) -> SamplerFacts:
            if sampler_id == "gone":
                raise NoResultFound
            return there(sampler_id)

        monkeypatch.setattr(one.journal.samplers, "facts", facts)
        gone = replace(sample(0), lane="gone")
        ids = await asyncio.gather(*map(one.journal.accept, (gone, sample(0), sample(1))))
        await until_async(lambda: one.queue.known(ids) == set(ids[1:]))

    play(scenario)


def test_a_sample_is_queued_at_what_it_may_use_and_with_the_share_of_its_organisation(
    play: Play, postgres_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    postgres_database.write_now(lambda session: session.execute(update(tables.Organisation).values(weight=3)))

    async def scenario(one: Replica, two: Replica) -> None:
        queued = list[Item]()
        monkeypatch.setattr(one.queue, "push_all", queued.extend)
        new = sample(0)
        await one.journal.accept(new)
        await until_async(lambda: queued)
        assert [(item.cost, item.weight) for item in queued] == [(new.tokens, 3)]

    play(scenario)


def test_a_sample_is_told_whether_a_generator_is_there_that_has_its_model(
    play: Play, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(one: Replica, two: Replica) -> None:
        request_id = await one.journal.accept(sample(0))
        await until_async(lambda: one.queue.known([request_id]))
        nobody = "waiting for the generator, which is starting; it is next"
        assert await two.result(request_id, 0.02) == Waiting("paused_capacity", nobody)
        one.queue.lease("here", ["other"], 2, 60)
        others = "no generator here has its base model m: it waits until one has"
        assert await two.result(request_id, 0.02) == Waiting("paused_capacity", others)
        with monkeypatch.context() as patch:
            patch.setattr(presence, "GRACE_S", -1.0)
            told = await two.result(request_id, 0.02)
            assert isinstance(told, Waiting)
            assert told.unserved
            with announced(url, "generator", ["m"]):
                await until_async(two.loads.there)
                told = await two.result(request_id, 0.02)
                assert isinstance(told, Waiting)
                assert told.reason.startswith("waiting for the generator, which is starting: it has been loading m for")
                assert not told.unserved
            assert not two.loads.there()
            two.loads.say(Loading("killed", "generator", ["m"]))
            assert [one.name for one in two.loads.there()] == ["killed"]
            patch.setattr(loading, "LAPSES_S", -1)
            assert not two.loads.there()
        one.queue.lease("there", ["m", "other"], 0, 60)
        busy = "waiting for the generator, which is busy; it is next"
        assert await two.result(request_id, 0.02) == Waiting("active", busy)

    play(scenario)


def test_what_waits_for_a_generator_that_is_gone_fails_with_the_reason(play: Play) -> None:
    async def scenario(one: Replica, two: Replica) -> None:
        request_id = await one.journal.accept(sample(0))
        await until_async(lambda: one.queue.known([request_id]))
        one.queue.lease("other", ["m"], 0, 1)
        (lease,) = one.queue.lease("here", ["m"], 2, 60)
        assert one.queue.decline(request_id, lease.epoch, "no routes here") == []
        await one.lead()
        outcome = await two.result(request_id)
        assert (outcome.error, outcome.category) == ("no routes here", "user")
        await until_async(lambda: not one.queue.known([request_id]))

    play(scenario)


def test_limits_hold_for_all_replicas_together(play: Play, url: str, blobs: FolderBlobs) -> None:
    async def scenario(one: Replica, two: Replica) -> None:
        ids = [await one.journal.accept(sample(0, b"x" * 6000)), await two.journal.accept(create(), run_row())]
        await until_async(lambda: two.journal._backlog.of("org") == one.journal._backlog.of("org") == (2, 6000))
        with pytest.raises(QueueFull, match="6000 bytes are queued and this operation has 4001"):
            await two.journal.accept(sample(1, b"x" * 4001))
        for replica in (one, two):
            in_flight = replica.journal.in_flight
            for scope, there in (("organisation", "org"), 2), (("organisation", "other"), 0), (("key", "7"), 0):
                assert (await in_flight.elsewhere(*scope)).count == there
            # Its run waits for it: it is always let in.
            assert (await in_flight.elsewhere("organisation", "org", train(1))).has
            assert not (await in_flight.elsewhere("organisation", "org", sample(1))).has
        await one.lead()
        async with generator(url, blobs), trainer(url, blobs):
            assert all([(await two.result(request_id)).error is None for request_id in ids])
        await until_async(lambda: two.journal._backlog.of("org") == (0, 0))
        assert (await two.journal.in_flight.elsewhere("organisation", "org")).count == 0
        await two.journal.accept(sample(1, b"x" * 4001))

    play(scenario)


def test_what_a_silent_replica_said_is_forgotten(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    board = BacklogBoard(url)
    assert board.exchange("dead", {"org": (5, 100)}) == []
    assert board.exchange("alive", {"org": (1, 2)}) == [{"org": [5, 100]}]  # type: ignore[comparison-overlap]
    monkeypatch.setattr(shared_limits, "SILENT_S", -1)
    assert board.exchange("alive", {}) == []
    board.close()


def test_a_session_that_ends_on_one_replica_closes_its_run_on_the_other(
    play: Play, url: str, blobs: FolderBlobs, postgres_database: Database
) -> None:
    async def scenario(one: Replica, two: Replica) -> None:
        await one.lead()
        async with trainer(url, blobs):
            await two.result(await two.journal.accept(create(), run_row()))

            def finish(session: Any) -> None:
                session.get_one(tables.Session, "s").state = "finished"

            await postgres_database.write(finish)
            two.journal.close_run(RUN)
            await until_async(lambda: RUN not in one.leadership.term.journal.training.runs)  # type: ignore[union-attr]
        with pytest.raises(RunClosed):
            await two.journal.accept(train(1))

    play(scenario)


def test_nothing_new_without_redis_or_while_draining(play: Play) -> None:
    async def scenario(one: Replica, two: Replica) -> None:
        one.journal.reachable = lambda: False
        two.journal.draining = True
        for replica in (one, two):
            with pytest.raises(Draining):
                await replica.journal.accept(sample(0))

    play(scenario)
