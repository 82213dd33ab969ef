"""Rows sent to the database as one document arrive as they were given, and a mistake in rows that wait to be sent
raises."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import Connection, select, text, update
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import Session

from store.blobs.room import what_failed
from store.database.bulk import AT_ONCE, Question, among, ask, insert_rows, make_sure, require, take_locks, update_rows
from store.database.db import Database
from store.tables import Budget, BudgetPeriod, Operation, Organisation
from tests.rows import in_batch

AT = datetime(2026, 3, 1, 1, 2, 3, 456_789, tzinfo=timezone(timedelta(hours=2)))
PLAN = {"text": 'a "quoted" \\ line\nand ünïcode 漢', "list": [1, None, {"deep": True}], "number": 2**60 + 1}


def row(op_id: str, seq: int, **changes: Any) -> dict[str, Any]:
    values = {
        "id": op_id,
        "org_id": "a",
        "session_id": "s",
        "key_id": None,
        "lane": "lane",
        "seq": seq,
        "kind": "sample",
        "base_model": "m'; --",
        "state": "queued",
        "tokens": 2**62,
        "hold_nusd": 2**63 - 1,
        "body_ref": "",
        "body_sha256": "",
        "plan": PLAN,
        "error": None,
        "accepted_at": AT,
        "timings": None,
    }
    return values | changes


@pytest.fixture
def database(any_database: Database) -> Database:
    any_database.write_now(lambda session: session.add(Organisation(id="a", name="a", created_at=AT)))
    return any_database


def operations(database: Database) -> list[Operation]:
    with database.read() as session:
        return list(session.query(Operation).order_by(Operation.seq))


def test_rows_come_back_as_they_were(database: Database) -> None:
    sent = [row("x", 1), row("y", 2, key_id=7, error="no", timings={"at": [1.5]})]
    database.write_now(lambda session: insert_rows(session.connection(), Operation, sent))
    for found, meant in zip(operations(database), sent, strict=True):
        assert {name: getattr(found, name) for name in meant} == meant
        assert found.accepted_at.tzinfo is UTC


def test_rows_are_changed_by_their_id_and_no_others(database: Database) -> None:
    database.write_now(
        lambda session: insert_rows(session.connection(), Operation, [row(name, n) for n, name in enumerate("xyz")])
    )
    changes = [
        {"id": "z", "state": "failed", "error": "why", "finished_at": AT, "timings": None},
        {"id": "x", "state": "done", "error": None, "finished_at": AT, "timings": {"n": 1}},
        {"id": "nobody", "state": "done", "error": None, "finished_at": AT, "timings": None},
    ]
    database.write_now(lambda session: update_rows(session.connection(), Operation, changes))
    found = [(op.id, op.state, op.error, op.finished_at, op.timings) for op in operations(database)]
    assert found == [
        ("x", "done", None, AT, {"n": 1}),
        ("y", "queued", None, None, None),
        ("z", "failed", "why", AT, None),
    ]
    assert [op.plan for op in operations(database)] == [PLAN] * 3


def test_rows_for_which_one_statement_of_sqlite_is_too_short(database: Database) -> None:
    def write(session: Session) -> None:
        connection, numbers = session.connection(), range(2 * AT_ONCE + 5)
        insert_rows(connection, Operation, [row(f"op{n}", n) for n in numbers])
        update_rows(connection, Operation, [{"id": f"op{n}", "error": str(n)} for n in numbers])

    database.write_now(write)
    found = [(op.id, op.seq, op.error) for op in operations(database)]
    assert found == [(f"op{n}", n, str(n)) for n in range(2 * AT_ONCE + 5)]


@pytest.mark.parametrize("ids", [[], ["x"], ["x", "y", "nobody"]])
def test_what_is_asked_comes_back_as_it_was_written(database: Database, ids: list[str]) -> None:
    """Integers that no float can hold, times, JSON, text of any kind, and None."""
    sent = [row("x", 1), row("y", 2, key_id=7, error='né\n"o"', timings={"at": [1.5]})]
    columns = [Operation.__table__.c[name] for name in sent[0]]
    question = {name: select(*columns).where(one) for name, one in among(columns[0], "ids").items()}

    def write(session: Session) -> list[list[Any]]:
        insert_rows(session.connection(), Operation, sent)
        return ask(session.connection(), (question, {"ids": ids}), (question, {"ids": []}))

    found, nothing = database.write_now(write)
    assert [list(one) for one in found] == [list(one.values()) for one in sent if one["id"] in ids]
    assert nothing == []


def test_a_mistake_in_rows_not_sent_yet_raises_and_undoes_its_savepoint_alone(database: Database) -> None:
    def mistaken(connection: Connection) -> None:
        with connection.begin_nested():
            connection.execute(update(Operation).values(state="done"))
            insert_rows(connection, Operation, [row("y", 1)])  # the lane's number is taken
            connection.execute(update(Operation).values(state="failed"))

    def write(session: Session) -> None:
        connection = session.connection()
        insert_rows(connection, Operation, [row("x", 1)])
        with pytest.raises(IntegrityError):
            mistaken(connection)
        insert_rows(connection, Operation, [row("z", 2)])

    database.write_now(write)
    assert [(op.id, op.state) for op in operations(database)] == [("x", "queued"), ("z", "queued")]


@pytest.mark.parametrize("beside", [False, True])
def test_of_writes_committed_together_only_the_mistaken_one_fails(database: Database, beside: bool) -> None:
    """Alone or `beside` writes that are not batched: rows are sent with COMMIT at the latest, and found wrong there."""

    def insert(session: Session, rows: list[dict[str, Any]]) -> list[None]:
        insert_rows(session.connection(), Operation, rows)
        return [None for _ in rows]

    async def story() -> list[Any]:
        works: list[Any] = [
            database.write_batched(insert, row(*one), lock="a") for one in (("x", 1), ("y", 1), ("z", 2))
        ]
        if beside:
            works.append(database.write(lambda session: insert_rows(session.connection(), Operation, [row("w", 2)])))
            works.append(database.write(lambda session: insert_rows(session.connection(), Operation, [row("v", 3)])))
        return await asyncio.gather(*works, return_exceptions=True)

    errors = [type(error) for error in asyncio.run(story())]
    fine, wrong = type(None), IntegrityError
    assert errors == [fine, wrong, fine] + ([wrong, fine] if beside else [])
    assert [op.id for op in operations(database)] == ["x", "z"] + (["v"] if beside else [])


def test_rows_that_were_just_inserted_can_be_changed(database: Database) -> None:
    def write(session: Session) -> None:
        insert_rows(session.connection(), Operation, [row("x", 1)])
        update_rows(session.connection(), Operation, [{"id": "x", "state": "done"}])
        insert_rows(session.connection(), Organisation, [{"id": "b", "name": "b", "created_at": AT}])
        update_rows(session.connection(), Organisation, [{"id": "b", "name": "changed"}])

    database.write_now(write)
    assert [op.state for op in operations(database)] == ["done"]
    with database.read() as session:
        assert session.get_one(Organisation, "b").name == "changed"


def test_a_connection_that_breaks_before_commit_fails_all_of_its_works_and_the_next_one_is_fine(
    postgres_database: Database,
) -> None:
    database = postgres_database
    database.write_now(lambda session: session.add(Organisation(id="a", name="a", created_at=AT)))
    broken = []

    def insert(session: Session, rows: list[dict[str, Any]]) -> list[None]:
        connection = session.connection()
        if not broken:
            broken.append(connection.execute(text("SELECT pg_backend_pid()")).scalar_one())
        insert_rows(connection, Operation, rows)
        if len(broken) == 1:
            with database.read() as other:
                broken.append(other.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": broken[0]}))
        return [None for _ in rows]

    async def story() -> list[Any]:
        works = [database.write_batched(insert, row(*one), lock="a") for one in (("x", 1), ("y", 2))]
        return await asyncio.gather(*works, return_exceptions=True)

    assert [type(error) for error in asyncio.run(story())] == [OperationalError] * 2
    assert operations(database) == []
    assert asyncio.run(story()) == [None] * 2
    assert [op.id for op in operations(database)] == ["x", "y"]


def test_rows_with_a_key_of_two_columns_are_told_apart_by_both(database: Database) -> None:
    budget = {"id": "b", "org_id": "a", "scope": "org", "scope_id": "a", "period": "month", "limit_nusd": 9}
    budget |= {"hard": True, "alert_pcts": [], "created_at": AT}
    months = [AT.replace(month=month) for month in (1, 2, 3)]

    def write(session: Session) -> None:
        take_locks(session, {"a"})
        periods = [{"budget_id": "b", "start": at, "spent_nusd": 0, "held_nusd": 0} for at in months]
        insert_rows(session.connection(), Budget, [budget])
        insert_rows(session.connection(), BudgetPeriod, periods)
        changed = [{"budget_id": "b", "start": at, "held_nusd": 1} for at in months[1:]]
        update_rows(session.connection(), BudgetPeriod, changed, key=("budget_id", "start"))

    database.write_now(write)
    with database.read() as session:
        assert [p.held_nusd for p in session.query(BudgetPeriod).order_by(BudgetPeriod.start)] == [0, 1, 1]


NAMED: Question = {dialect: select(Operation.id).where(one) for dialect, one in among(Operation.id, "ids").items()}
COUNTED: Question = {
    dialect: select(Operation.seq).where(one, Operation.state == "queued")
    for dialect, one in among(Operation.seq, "numbers").items()
}


def test_questions_are_answered_in_order_and_see_what_was_written_before(database: Database) -> None:
    def batch(session: Session, items: list[str]) -> list[list[list[Any]]]:
        connection = session.connection()
        insert_rows(connection, Operation, [row("x", 1), row("y", 2)])
        first = ask(connection, (NAMED, {"ids": ["x", "z"]}), (COUNTED, {"numbers": [1, 2]}), (NAMED, {"ids": []}))
        update_rows(connection, Operation, [{"id": "y", "state": "done"}])
        return [[*first, *ask(connection, (COUNTED, {"numbers": [2, 1]}))] for _ in items]

    found = in_batch(database, batch, "item", lock="a")
    assert [sorted(map(tuple, rows)) for rows in found] == [[("x",)], [(1,), (2,)], [], [(1,)]]


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another"])
@pytest.mark.parametrize("batched", [False, True], ids=["work", "batch"])
def test_the_rows_of_a_failed_write_are_never_sent(database: Database, batched: bool, beside: bool) -> None:
    def fails(session: Session, items: list[str] | None = None) -> list[None]:
        insert_rows(session.connection(), Operation, [row("lost", 1)])
        raise ValueError

    def writes(session: Session, items: list[str]) -> list[None]:
        insert_rows(session.connection(), Operation, [row(*item) for item in items])  # type: ignore[misc]
        return [None for _ in items]

    async def story() -> list[Any]:
        works: list[Any] = [database.write_batched(fails, "", lock="a") if batched else database.write(fails)]
        works += [database.write_batched(writes, ("x", 2), lock="a")] if beside else []
        found = await asyncio.gather(*works, return_exceptions=True)
        await database.write_batched(writes, ("y", 3), lock="a")
        return found

    assert [type(error) for error in asyncio.run(story())] == [ValueError, type(None)][: 1 + beside]
    assert [op.id for op in operations(database)] == (["x"] if beside else []) + ["y"]


LOCKS = text(
    "SELECT classid::bigint, objid::bigint FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
)


def test_a_group_holds_the_locks_of_all_its_writes_and_batches_are_planned_once(
    postgres_database: Database,
) -> None:
    database = postgres_database

    def held(session: Session) -> tuple[Any, ...]:
        connection = session.connection()
        plans = text("SELECT current_setting('plan_cache_mode'), current_setting('enable_seqscan')")
        return frozenset(map(tuple, connection.execute(LOCKS))), tuple(connection.execute(plans).one())

    def batch(session: Session, items: list[str]) -> list[Any]:
        return [held(session) for _ in items]

    async def several(*more: Any) -> list[Any]:
        works = [database.write_batched(batch, name, lock=name) for name in ("a", "b", "a")]
        return await asyncio.gather(*works, *more)

    def takes(session: Session) -> Any:
        take_locks(session, {"a", "b"})
        return held(session)

    plain, planned = ("auto", "on"), ("force_generic_plan", "off")
    one, two = (asyncio.run(database.write_batched(batch, name, lock=name)) for name in "ab")
    assert [len(one[0]), len(two[0]), len(one[0] | two[0])] == [1, 1, 2]
    assert (one[1], two[1]) == (planned, planned)
    three = asyncio.run(database.write(held, lock="c"))
    assert (len(three[0]), three[1]) == (1, plain)
    assert asyncio.run(several()) == [(one[0] | two[0], planned)] * 3
    assert asyncio.run(several(database.write(held, lock="c"))) == [(one[0] | two[0] | three[0], plain)] * 4
    assert database.write_now(takes) == (one[0] | two[0], plain)
    assert database.write_now(held) == (frozenset(), plain)


def test_a_connection_that_is_lost_tells_what_sqlalchemy_would(postgres_database: Database) -> None:
    def loses(session: Session, items: list[str]) -> list[Any]:
        connection = session.connection()
        pid = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
        with postgres_database.read() as other:
            other.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})
        return ask(connection, (NAMED, {"ids": ["x"]}))

    with pytest.raises(OperationalError) as caught:
        in_batch(postgres_database, loses, "", lock="a")
    assert caught.value.connection_invalidated

    def wrong(session: Session) -> Any:
        connection = session.connection()
        insert_rows(connection, Operation, [row("x", 1)])  # its organisation does not exist
        return ask(connection, (NAMED, {"ids": ["x"]}))

    with pytest.raises(IntegrityError) as refused:
        postgres_database.write_now(wrong)
    assert not refused.value.connection_invalidated


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("beside", [0, 2])
def test_a_postgresql_that_takes_no_writes_counts_as_away_and_another_connection_is_tried(
    postgres_database: Database, batched: bool, beside: int
) -> None:
    """After a failover the writer's connection may lead to a server that is a standby now; a managed PostgreSQL whose
    disk is nearly full takes no writes either. In neither case are the writes at fault."""
    database = postgres_database
    database.write_now(lambda session: session.execute(text("SET default_transaction_read_only = on")) and None)

    def batch(session: Session, names: list[str]) -> list[None]:
        insert_rows(session.connection(), Organisation, [{"id": n, "name": n, "created_at": AT} for n in names])
        return [None] * len(names)

    def one(session: Session) -> None:
        session.add(Organisation(id="late", name="late", created_at=AT))

    async def all_at_once() -> list[Any]:
        works: list[Any] = [database.write_batched(batch, "late", lock="") if batched else database.write(one)]
        works += [database.write(lambda session: session.scalar(select(1))) for _ in range(beside)]
        return await asyncio.gather(*works, return_exceptions=True)

    found = asyncio.run(all_at_once())
    assert isinstance(found[0], OperationalError)
    assert what_failed(found[0]) == "the server's database takes no writes"
    assert asyncio.run(all_at_once()) == [None, *[1] * beside]
    with database.read() as session:
        assert session.scalars(select(Organisation.id)).all() == ["late"]


def test_a_failed_requirement_fails_only_the_batch_that_has_it(database: Database) -> None:
    """Two batches share a transaction: the requirement is checked before its COMMIT, which would fail both."""

    class Missing(Exception):
        pass

    def found(rows: list[Any]) -> None:
        if not rows:
            raise Missing

    def requires(session: Session, ids: list[str]) -> list[None]:
        require(session.connection(), NAMED, {"ids": ids}, found)
        make_sure(session.connection())
        return [None] * len(ids)

    def inserts(session: Session, ids: list[str]) -> list[None]:
        insert_rows(session.connection(), Operation, [row(op_id, 1) for op_id in ids])
        return [None] * len(ids)

    async def both() -> list[Any]:
        works = [database.write_batched(requires, "none", lock="a"), database.write_batched(inserts, "x", lock="a")]
        return await asyncio.gather(*works, return_exceptions=True)

    refused, inserted = asyncio.run(both())
    assert isinstance(refused, Missing)
    assert inserted is None
    assert [operation.id for operation in operations(database)] == ["x"]
