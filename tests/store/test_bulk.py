"""Rows written as one document are the rows that were meant, and a mistake in what waits to be sent is told."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import Connection, select, text, update
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import Session

from store.bulk import AT_ONCE, among, ask, insert_rows, update_rows
from store.db import Database
from store.tables import Operation, Organisation

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
    """Whole numbers beyond a float's, times, JSON, text of any kind, and nothing."""
    sent = [row("x", 1), row("y", 2, key_id=7, error='né\n"o"', timings={"at": [1.5]})]
    columns = [Operation.__table__.c[name] for name in sent[0]]
    question = {name: select(*columns).where(one) for name, one in among(columns[0], "ids").items()}

    def write(session: Session) -> list[list[Any]]:
        insert_rows(session.connection(), Operation, sent)
        return ask(session.connection(), (question, {"ids": ids}), (question, {"ids": []}))

    found, nothing = database.write_now(write)
    assert [list(one) for one in found] == [list(one.values()) for one in sent if one["id"] in ids]
    assert nothing == []


def test_a_mistake_in_what_waits_is_told_and_undoes_its_savepoint_alone(database: Database) -> None:
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
def test_of_works_that_were_committed_together_only_the_mistaken_one_fails(database: Database, beside: bool) -> None:
    """Alone or `beside` a work of another kind: rows are written at the latest with COMMIT, and found wrong there."""

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

    database.write_now(write)
    assert [op.state for op in operations(database)] == ["done"]


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
