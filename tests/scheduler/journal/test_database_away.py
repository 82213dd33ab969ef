"""The database goes away while operations are accepted and settled: all of them end once, and the money is right."""

from __future__ import annotations

import asyncio
import sqlite3
import traceback
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import event, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from billing.money import ledger
from billing.money.accounts import OutOfMoney
from billing.money.wallets import set_mode, wallet_of
from billing.prices import KINDS, load_prices
from billing.reports.reconcile import check
from scheduler.journal.journal import Journal
from scheduler.links.messages import Done, OpKind, RunSpec
from scheduler.order import expected_cost
from scheduler.order.operations import INTERACTIVE, NewOperation, Outcome
from scheduler.order.plans import BODY_ONLY, Create, Sample
from store import tables
from store.blobs.contract import StoreAway
from store.blobs.folder import FolderBlobs
from store.blobs.room import NoRoom
from store.database.db import Database
from tests.migrated import database_in
from tests.rows import run_row, session_row
from tests.servers import PostgresServer

NOW = datetime.now(UTC)
CLIENTS, EACH = 8, 20
#: Allowed once the database is back, on any machine.
RECOVERS_WITHIN_S = 120.0


def set_up(session: Session, balance_nusd: int = 10**12) -> None:
    session.add(tables.Organisation(id="org", name="org", created_at=NOW))
    session.flush()
    session.add(session_row("org", NOW))
    session.flush()
    session.add(
        tables.Sampler(
            id="s:sample:0", org_id="org", session_id="s", sampling_session_seq_id=0, base_model="m", adapter_ref="",
            kind="base", created_at=NOW,
        )
    )  # fmt: skip
    set_mode(session, "org", "prepaid", 0)
    ledger.post(session, org_id="org", type="topup", amount_nusd=balance_nusd, ref_type="t", ref_id="t")


def sample(seq: int) -> NewOperation:
    return NewOperation("org", "s", "s:sample:0", seq, "sample", "m", 20, b"{}", Sample(1, 10, "interactive"))


async def accept(journal: Journal, seq: int) -> str:
    """Submit as clients do: again, with the same number, after an error of the server."""
    while True:
        try:
            return await journal.accept(sample(seq))
        except NoRoom:
            await asyncio.sleep(0.05)


async def work(journal: Journal, numbers: range, ended: list[int], under_way: asyncio.Event) -> None:
    """A client and its worker: each operation is accepted, and ends with its result."""
    for seq in numbers:
        request_id = await accept(journal, seq)
        journal.finish(Done(request_id, b"result", {"prefill": 10, "sample": 5}))
        outcome = await journal.outcome("org", request_id, 60.0)
        assert isinstance(outcome, Outcome), outcome
        assert outcome.payload == b"result"
        ended.append(seq)
        if len(ended) == CLIENTS:
            under_way.set()


def test_postgres_is_killed_and_comes_back(
    postgres: PostgresServer, postgres_database: Database, tmp_path: Path
) -> None:
    database = postgres_database
    name = database.url.rsplit("/", 1)[1]
    postgres.execute(f'ALTER DATABASE "{name}" SET synchronous_commit = on')  # as in production: a commit survives
    database.write_now(set_up)
    database = Database(database.url)
    ended: list[int] = []

    async def story() -> None:
        under_way = asyncio.Event()
        journal = Journal(database, FolderBlobs(tmp_path / "blobs"), load_prices())
        tasks = [
            asyncio.create_task(work(journal, range(first * EACH, (first + 1) * EACH), ended, under_way))
            for first in range(CLIENTS)
        ]
        await under_way.wait()
        await asyncio.to_thread(postgres.stop)
        await asyncio.sleep(0.3)
        assert len(ended) < CLIENTS * EACH
        await asyncio.to_thread(postgres.start)
        await asyncio.wait_for(asyncio.gather(*tasks), RECOVERS_WITHIN_S)

    asyncio.run(story())
    assert sorted(ended) == list(range(CLIENTS * EACH))
    assert check(database) == []
    with database.read() as session:
        assert session.query(tables.UsageEvent).count() == 2 * CLIENTS * EACH
        assert session.query(tables.Operation).filter(tables.Operation.state != "done").count() == 0
    wallet = database.write_now(lambda session: wallet_of(session, "org"))
    assert (wallet.held_nusd, wallet.balance_nusd < 10**12) == (0, True)
    database.close()


def test_a_full_disk_refuses_and_settles_when_there_is_room(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.journal.accepting.acceptance.INSERT_AGAIN_S", (0.0,))
    database.write_now(set_up)
    journal = Journal(database, FolderBlobs(tmp_path / "blobs"), load_prices())

    def room(pages: int) -> None:
        """Make room for so many more pages than there are."""

        def write(session: Session) -> None:
            there = session.execute(text("PRAGMA page_count")).scalar_one()
            session.execute(text(f"PRAGMA max_page_count = {there + pages}")).all()

        for _ in range(20):
            with suppress(OperationalError):  # together with a settlement that found no room
                return database.write_now(write)
        raise AssertionError("no room was made")

    refusals: list[str] = []

    async def fill() -> list[str]:
        accepted: list[str] = []
        while True:
            try:
                accepted.append(await journal.accept(sample(len(accepted))))
            except NoRoom as error:
                refusals.append(str(error))
                return accepted

    async def story() -> None:
        room(20)
        accepted = await fill()
        assert accepted
        assert "the server's disk is full" in refusals[0]
        assert check(database) == []  # what did not fit has left nothing
        for request_id in accepted:
            journal.finish(Done(request_id, b"result", {"prefill": 10, "sample": 5}))
        await asyncio.sleep(0.2)  # settling finds no room either, and tries again
        assert check(database) == []
        room(10_000)
        for request_id in accepted:
            outcome = await journal.outcome("org", request_id, 60.0)
            assert isinstance(outcome, Outcome), outcome
            assert outcome.payload == b"result"
        assert await journal.accept(sample(len(accepted)))  # the refused number is still free

    asyncio.run(story())
    assert check(database) == []


def test_rows_that_come_with_an_operation_are_inserted_however_often_the_commit_fails(tmp_path: Path) -> None:
    """Their statements had run by then, so the session that ran them took them for stored."""
    database = database_in(tmp_path)
    database.write_now(set_up)
    failures = [OperationalError("COMMIT", {}, Exception("disk I/O error"))] * 2

    def fail(_connection: object) -> None:
        if failures:
            raise failures.pop()

    event.listen(database._write_engine, "commit", fail)
    run = run_row("org", NOW)

    async def scenario() -> str:
        journal = Journal(database, FolderBlobs(tmp_path / "blobs"), load_prices())
        return await journal.accept(sample(1), run)

    request_id = asyncio.run(scenario())
    with database.read() as session:
        assert session.get(tables.Operation, request_id) is not None
        assert session.get(tables.Run, "s:train:0") is not None
    database.close()


@pytest.mark.parametrize("pauses", [(0.0,), ()], ids=["asked again", "its client asks again"])
def test_what_was_stored_is_not_refused_for_what_it_holds_itself(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: tuple[float, ...]
) -> None:
    """Its commit succeeded and the answer was lost: there is money for no more than one operation."""
    monkeypatch.setattr("scheduler.journal.accepting.acceptance.INSERT_AGAIN_S", pauses)
    nano = {"version": "n", "effective_from": NOW.replace(year=2020), "models": {"*": dict.fromkeys(KINDS, 1000)}}
    database.write_now(lambda session: set_up(session, 100))
    blobs = FolderBlobs(tmp_path / "blobs")
    commit, lost = database._write_engine.dialect.do_commit, list[None]()

    def lose(connection: Any) -> None:
        commit(connection)
        if lost:
            lost.pop()
            raise sqlite3.OperationalError("the answer is lost")

    monkeypatch.setattr(database._write_engine.dialect, "do_commit", lose)

    async def story() -> str:
        journal = Journal(database, blobs, load_prices([nano | {"storage_uusd_per_gb_month": 1}]))
        plan = Create(RunSpec("s:train:0", "m", 8, 32.0, 0, True, True, True), INTERACTIVE)
        new = NewOperation("org", "s", "s:train:0", 0, OpKind.CREATE, "m", 0, b"{}", plan)
        await journal.accept(new, run_row("org", NOW))
        new = replace(new, seq=1, kind=OpKind.FORWARD_BACKWARD, tokens=100, body=b"data", plan=BODY_ONLY)
        lost.append(None)
        if not pauses:
            with pytest.raises(NoRoom):
                await journal.accept(new)
        request_id = await journal.accept(new)
        assert await journal.accept(new) == request_id
        assert journal.training.opened(request_id) is not None
        with pytest.raises(OutOfMoney):
            await journal.accept(replace(new, seq=2))
        return request_id

    request_id = asyncio.run(story())
    with database.read() as session:
        row = session.get_one(tables.Operation, request_id)
    assert (row.seq, row.hold_nusd, blobs.get(row.body_ref)) == (1, 100, b"data")
    assert check(database) == []


def test_a_disk_that_keeps_the_body_of_what_cannot_be_paid_for_hides_no_reason(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it leave a repeat waiting that came at the same moment."""
    nano = {"version": "n", "effective_from": NOW.replace(year=2020), "models": {"*": dict.fromkeys(KINDS, 1000)}}
    database.write_now(lambda session: set_up(session, 99))

    def away(_blobs: FolderBlobs, _ref: str) -> None:
        raise StoreAway("the server's object store does not answer (Unreachable)")

    monkeypatch.setattr(FolderBlobs, "delete", away)

    async def story() -> None:
        prices = load_prices([nano | {"storage_uusd_per_gb_month": 1}])
        journal = Journal(database, FolderBlobs(tmp_path / "blobs"), prices)
        plan = Create(RunSpec("s:train:0", "m", 8, 32.0, 0, True, True, True), INTERACTIVE)
        new = NewOperation("org", "s", "s:train:0", 0, OpKind.CREATE, "m", 0, b"{}", plan)
        await journal.accept(new, run_row("org", NOW))
        new = replace(new, seq=1, kind=OpKind.FORWARD_BACKWARD, tokens=100, body=b"data", plan=BODY_ONLY)
        async with asyncio.timeout(10):
            ends = await asyncio.gather(*(journal.accept(new) for _ in range(2)), return_exceptions=True)
        assert [type(end) for end in ends] == [OutOfMoney, OutOfMoney]

    asyncio.run(story())


def test_no_event_loop_waits_for_the_database(
    any_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that waits for a frozen database answers nobody, not even a probe whether the server lives."""
    any_database.write_now(set_up)
    monkeypatch.setattr(expected_cost, "WEIGHT_LASTS_S", 0.0)
    read, waited = Database.read, list[str]()

    def noted(self: Database) -> Any:
        with suppress(RuntimeError):
            asyncio.get_running_loop()
            waited.append("".join(traceback.format_stack(limit=4)[:-1]))
        return read(self)

    monkeypatch.setattr(Database, "read", noted)
    spec = RunSpec("s:train:0", "m", 8, 32.0, 0, train_attn=True, train_mlp=True, train_unembed=True)
    create = NewOperation("org", "s", spec.run_id, 0, OpKind.CREATE, "m", 1, plan=Create(spec, INTERACTIVE))
    train = NewOperation("org", "s", spec.run_id, 1, OpKind.FORWARD_BACKWARD, "m", 10, b"body", BODY_ONLY)

    async def story() -> None:
        journal = Journal(any_database, FolderBlobs(tmp_path / "blobs"), load_prices())
        for new, rows in (create, (run_row("org", NOW, spec.run_id),)), (train, ()), (sample(0), ()), (sample(1), ()):
            request_id = await journal.accept(new, *rows)
            journal.finish(Done(request_id, b"result", {"tokens": 10, "prefill": 10, "sample": 5}))
            await journal.flush()
            journal.answers.clear()
            assert await journal.taken(new.lane, new.seq)
            assert await journal.accept(new) == request_id
            assert isinstance(await journal.outcome("org", request_id, 1.0), Outcome)
        # Of another process, which died after it had made it durable:
        other = Journal(any_database, FolderBlobs(tmp_path / "blobs"), load_prices())
        left = await other.accept(sample(2))
        assert await journal.accept(sample(2)) == left
        journal.finish(Done(left, b"result", {"prefill": 10, "sample": 5}))
        assert isinstance(await journal.outcome("org", left, 30.0), Outcome)

    asyncio.run(story())
    assert sorted(set(waited)) == []
