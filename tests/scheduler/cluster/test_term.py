"""How a term as leader ends, and what a superseded leader can still do."""

from __future__ import annotations

import asyncio
import gc
from datetime import datetime, timedelta, tzinfo
from typing import Any

import pytest
import redis
from msgspec.structs import replace
from sqlalchemy.exc import OperationalError

from scheduler.cluster import election, term
from scheduler.journal import gaps
from scheduler.journal.rows import from_row
from scheduler.links.messages import Done, Failure
from scheduler.order.operations import Outcome
from store import tables
from store.blobs.folder import FolderBlobs
from store.database.db import Database
from tests.scheduler.cluster.replicas import LONG_AGO, Play, Replica, generator, sample, trainer
from tests.scheduler.journal.kit import RUN, create, run_row, train
from tests.waiting import until_async


class Away:
    """A database that accepts nothing while it is `away`."""

    def __init__(self, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        self.away, self.refused = False, 0
        for name in ("write", "write_batched"):
            monkeypatch.setattr(database, name, self._through(getattr(database, name)))

    def _through(self, write: Any) -> Any:
        async def maybe(*arguments: Any, **options: Any) -> Any:
            if self.away:
                self.refused += 1
                raise OperationalError("INSERT", {}, Exception("the connection is lost"))
            return await write(*arguments, **options)

        return maybe


def test_a_replica_that_can_store_nothing_stops_and_the_next_leader_does_what_it_left(
    play: Play, url: str, blobs: FolderBlobs, postgres_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(term, "STORE_WITHIN_S", 0.1)
    database = Away(postgres_database, monkeypatch)

    async def scenario(one: Replica, two: Replica) -> None:
        await one.lead()
        ids = [await one.journal.accept(create(), run_row()), await one.journal.accept(train(1))]
        cancelled = await one.journal.accept(sample(0))
        await until_async(lambda: one.queue.known([cancelled]))
        database.away = True
        assert await one.journal.cancel("org", cancelled)
        async with trainer(url, blobs) as given:
            await until_async(lambda: database.refused > 2 and (1, False) in given)
            async with asyncio.timeout(20):
                await one.leadership.stop(0.1)
                await one.journal.stop(0.1)
            assert one.leadership.term is None
            database.away = False
            await two.lead()
            for request_id in ids:
                assert isinstance(await two.result(request_id), Outcome)

    play(scenario)


class Ahead(datetime):
    """The clock of a machine that was set wrong."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return datetime.now(tz) + timedelta(hours=1)


@pytest.mark.parametrize("killed", [True, False])
def test_who_leads_does_not_depend_on_a_replicas_clock(
    play: Play, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    monkeypatch.setattr(election, "datetime", Ahead, raising=False)

    async def scenario(one: Replica, two: Replica) -> None:
        await one.lead()
        if killed:
            one.leadership._elections.cancel()  # type: ignore[union-attr]
        else:
            await one.leadership.stop(0.1)
        monkeypatch.setattr(election, "datetime", datetime, raising=False)
        await two.lead()

    play(scenario)


def test_a_superseded_leader_deletes_nothing_of_a_run_that_it_believes_to_be_over(
    play: Play, url: str, blobs: FolderBlobs, postgres_database: Database
) -> None:
    """Its session has ended, and the superseded leader has not heard of what was accepted until then."""

    def usurp(session: Any) -> None:
        session.get_one(tables.JobLease, tables.LEADS).until = LONG_AGO
        session.get_one(tables.Session, "s").state = "finished"

    async def scenario(one: Replica, two: Replica) -> None:
        await one.lead()
        async with trainer(url, blobs):
            for request_id in [await one.journal.accept(create(), run_row()), await one.journal.accept(train(1))]:
                assert isinstance(await two.result(request_id), Outcome)
        old = one.leadership.term
        assert old is not None
        for task in (one.leadership._elections, *old._tasks):  # it is stopped, and notices nothing
            task.cancel()  # type: ignore[union-attr]
        last = await two.journal.accept(train(2))
        await postgres_database.write(usurp)
        needed = blobs.listed("ops/*/*")
        await two.lead()
        old.journal.training.close_run(RUN)
        await old.journal.training.flush()
        assert len(needed) == 2
        assert blobs.listed("ops/*/*") == needed
        async with trainer(url, blobs) as given:
            assert (await two.result(last)).payload == b"result"
        given = [each for each in given if each[0] >= 0]  # it may have begun under the previous leader
        assert given[:3] == [(0, True), (1, True), (2, False)]
        await until_async(lambda: RUN not in two.leadership.term.journal.training.runs)  # type: ignore[union-attr]
        await until_async(lambda: not blobs.listed("ops/*/*"))

    play(scenario)


def test_a_leader_that_finds_itself_superseded_in_the_background_steps_down_and_logs_no_error(
    play: Play,
    url: str,
    blobs: FolderBlobs,
    postgres_database: Database,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(gaps, "GAP_LASTS_S", 0.0)

    def usurp(session: Any) -> None:
        session.get_one(tables.JobLease, tables.LEADS).holder = "another"

    async def scenario(one: Replica, two: Replica) -> None:
        await one.lead()
        async with trainer(url, blobs):
            await two.result(await two.journal.accept(create(), run_row()))
        old = one.leadership.term
        assert old is not None
        for task in (one.leadership._elections, *old._tasks):  # it is stopped, and notices nothing
            task.cancel()  # type: ignore[union-attr]
        behind_a_gap = await two.journal.accept(train(2))
        row = await postgres_database.write(lambda session: session.get_one(tables.Operation, behind_a_gap))
        await postgres_database.write(usurp)
        op, training = from_row(row), old.journal.training
        lane = training.runs[RUN]
        for begin in (
            lambda: training.enqueue(op),
            lambda: training.note_attempts(op),
            lambda: training.finish(Done(op.id, b"result")),
            lambda: training.setbacks.break_run(lane, "its snapshot is lost"),
            lambda: training._forget(lane),
        ):
            old.over.clear()
            begin()
            async with asyncio.timeout(5):
                await old.over.wait()

    play(scenario)
    gc.collect()
    assert [each.getMessage() for each in caplog.records if each.name == "asyncio"] == []


def test_what_redis_lost_behind_many_samples_that_wait_for_long_is_queued_again(
    play: Play, url: str, blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for a model that no generator has; there are more older ones than one look takes."""
    monkeypatch.setattr(term, "RESCAN_ROWS", 3)

    async def scenario(one: Replica, two: Replica) -> None:
        waiting = [await two.journal.accept(replace(sample(seq), base_model="other")) for seq in range(4)]
        ids = [await two.journal.accept(sample(seq)) for seq in range(4, 12)]
        await two.journal.flush()
        redis.Redis.from_url(url).flushall()
        await one.lead()
        async with generator(url, blobs) as got:
            assert all([isinstance(await two.result(request_id), Outcome) for request_id in ids])
        await until_async(lambda: one.queue.known(waiting) == set(waiting))
        assert sorted(got) == sorted(ids)

    play(scenario)


def test_a_run_that_ended_while_a_look_at_it_was_under_way_is_not_taken_up_again(
    play: Play, url: str, blobs: FolderBlobs, postgres_database: Database
) -> None:
    """It would be created once more, and kept until the leader ends."""

    def finish(session: Any) -> None:
        session.get_one(tables.Session, "s").state = "finished"

    async def scenario(one: Replica, two: Replica) -> None:
        await one.lead()
        leader = one.leadership.term
        assert leader is not None
        runs = leader.journal.training.runs
        created = await two.journal.accept(create(), run_row())
        await until_async(lambda: RUN in runs)
        (row,), logs = leader._rows([created]), leader.journal.logs_of([RUN])
        async with trainer(url, blobs) as given:
            await two.result(created)
            await postgres_database.write(finish)
            two.journal.close_run(RUN)
            await until_async(lambda: RUN not in runs)
            late = leader.journal.take_in(row, logs)
            assert late is not None
            assert not await one.journal.end(late, Done(late.id, failure=Failure("too late", "user")))
            await leader.journal.training.flush()
        assert (RUN in runs, given) == (False, [(0, False)])

    play(scenario)
