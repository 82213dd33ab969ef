"""What a replica reads from the database for the operations that it accepts, and for clients who wait for them."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import event

from scheduler.cluster.numbers import Key, Number, numbers_of
from scheduler.cluster.outbox import Gathered
from scheduler.cluster.shared_journal import LOOK_AGAIN_S
from scheduler.journal.accepting.acceptance import Acceptance
from scheduler.links.broadcasts import Ended, Told
from scheduler.order.operations import Outcome, RunClosed
from store import tables
from store.blobs.contract import Blobs
from store.blobs.folder import FolderBlobs
from store.database.caller import Caller, acting_as
from store.database.db import Database
from tests import rows
from tests.scheduler.cluster.replicas import Play, Replica, sample, trainer
from tests.scheduler.journal.kit import RUN, create, run_row, train

NOW = datetime.now(UTC)


def test_what_is_asked_in_one_turn_is_looked_up_together() -> None:
    asked: list[list[Key]] = []

    async def look(keys: list[Key]) -> list[Number]:
        asked.append(keys)
        await asyncio.sleep(0.01)
        return [Number(taken=seq > 1, run_open=True) for _, seq in keys]

    async def scenario() -> None:
        gathered = Gathered(look)
        first = [asyncio.ensure_future(gathered.get(("run", seq))) for seq in range(3)]
        await asyncio.sleep(0.005)
        first.append(asyncio.ensure_future(gathered.get(("run", 3))))
        first[0].cancel()
        assert [number.taken for number in await asyncio.gather(*first[1:])] == [False, True, True]
        assert asked == [[("run", 0), ("run", 1), ("run", 2)], [("run", 3)]]

    asyncio.run(scenario())


def test_a_look_up_that_fails_is_told_to_all_and_the_next_one_works() -> None:
    broken = [True]

    async def look(keys: list[Key]) -> list[Number]:
        if broken.pop():
            raise OSError("away")
        return [Number(taken=False, run_open=False) for _ in keys]

    async def scenario() -> None:
        gathered = Gathered(look)
        found = await asyncio.gather(gathered.get(("a", 1)), gathered.get(("b", 1)), return_exceptions=True)
        assert [type(one) for one in found] == [OSError, OSError]
        broken.append(False)
        assert not (await gathered.get(("a", 1))).taken

    asyncio.run(scenario())


def test_numbers_are_of_their_own_lane_and_runs_are_open_while_their_session_is(database: Database) -> None:
    def fill(session: Any) -> None:
        session.add(tables.Organisation(id="org", name="org", created_at=NOW))
        session.flush()
        session.add_all([rows.session_row("org", NOW, "s"), rows.session_row("org", NOW, "over", state="ended")])
        session.flush()
        session.add_all([rows.run_row("org", NOW, "a"), rows.run_row("org", NOW, "b", state="closed", model_seq_id=1)])
        session.add(rows.run_row("org", NOW, "c", "over"))

    database.write_now(fill)
    assert numbers_of(database, [("c", 0), ("a", 7), ("b", 7), ("none", 7)]) == [
        Number(taken=False, run_open=found) for found in (False, True, False, False)
    ]


def test_a_step_is_looked_up_once(
    play: Play, url: str, blobs: FolderBlobs, postgres_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    statements, looked = list[str](), list[int]()
    stored = Acceptance._stored

    def look(self: Acceptance, lane: str, seq: int) -> Any:
        looked.append(seq)
        return stored(self, lane, seq)

    def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        statements.append(statement)

    async def scenario(one: Replica, two: Replica) -> None:
        await two.lead()
        await one.journal.accept(create(), run_row())
        async with trainer(url, blobs):
            looked.clear()
            event.listen(postgres_database._read_engine, "before_cursor_execute", note)
            with acting_as(Caller("rival", "key:9")):  # the first to ask is not who the others ask for
                assert not await one.journal.taken(RUN, 1)
            request_id = await one.journal.accept(train(1))
            event.remove(postgres_database._read_engine, "before_cursor_execute", note)
            assert len([text for text in statements if "runs.id = ANY" in text]) == 1, statements
            assert looked == []
            assert (await one.result(request_id)).payload == b"result"
            assert await one.journal.taken(RUN, 1)
            assert await one.journal.accept(train(1)) == request_id  # a repeat, whatever was known before

    monkeypatch.setattr(Acceptance, "_stored", look)
    play(scenario)


def test_what_is_told_is_for_its_own_organisation(play: Play, url: str, blobs: Blobs) -> None:
    async def scenario(one: Replica, _two: Replica) -> None:
        request_id = await one.journal.accept(create(), run_row())
        ours = asyncio.ensure_future(one.journal.outcome("org", request_id, 5))
        await asyncio.sleep(0.05)
        theirs = asyncio.ensure_future(one.journal.outcome("rival", request_id, 5))  # begins before ours goes on
        told = Told(b"secret", "text/plain", None, "server")
        one.journal.heard([Ended(request_id, "org", RUN, 0, "create", 6, told)], 1)
        assert await ours == Outcome(b"secret", "text/plain")
        assert await theirs is None

    play(scenario)


def test_who_is_looking_while_it_ends_looks_again(
    play: Play, url: str, blobs: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although another one asks for it in between."""
    looks, reading, ended = [1], threading.Event(), threading.Event()

    async def scenario(one: Replica, two: Replica) -> None:
        request_id = await one.journal.accept(create(), run_row())
        look = two.journal._look

        def slow(org_id: str, asked: str) -> object:
            found = look(org_id, asked)
            if looks and looks.pop():
                reading.set()
                ended.wait(5)
            return found

        monkeypatch.setattr(two.journal, "_look", slow)
        first = asyncio.ensure_future(two.journal.outcome("org", request_id, LOOK_AGAIN_S * 2))
        await asyncio.to_thread(reading.wait, 5)
        told = Told(b"made", "text/plain", None, "server")
        two.journal.heard([Ended(request_id, "org", RUN, 0, "create", 4, told)], 1)
        assert await two.journal.outcome("org", request_id, 5) == Outcome(b"made", "text/plain")
        ended.set()
        began = time.monotonic()
        assert await first == Outcome(b"made", "text/plain")
        assert time.monotonic() - began < LOOK_AGAIN_S / 2

    play(scenario)


def test_numbers_of_samples_are_not_kept(play: Play, url: str, blobs: Blobs) -> None:
    async def scenario(one: Replica, _two: Replica) -> None:
        assert not await one.journal.taken("s:sample:0", 0)
        await one.journal.accept(sample(0))
        assert not one.journal._fresh

    play(scenario)


def test_an_operation_of_a_run_whose_session_has_ended_is_refused(play: Play, postgres_database: Database) -> None:
    async def scenario(one: Replica, _two: Replica) -> None:
        await one.journal.accept(create(), run_row())
        assert not await one.journal.taken(RUN, 1)
        postgres_database.write_now(lambda session: setattr(session.get_one(tables.Session, "s"), "state", "ended"))
        assert not await one.journal.taken(RUN, 1)  # looked up anew for each request
        for _ in range(2):  # the second looks for itself
            with pytest.raises(RunClosed):
                await one.journal.accept(train(1))

    play(scenario)
