"""A data folder of the first revision is taken over: every row as it was, the same money, the same audit log."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from alembic import command
from sqlalchemy import Connection, Table, create_engine, func, insert, inspect, select
from sqlalchemy.orm import Session

from billing.reports.reconcile import reconcile
from migrations.upgrade import alembic_config, head, migrate, revision_of
from store.database import audit
from store.database.db import Database
from store.tables import Base, LedgerEntry, Organisation, UsageEvent, Wallet

#: Rows of a data folder with which the code of that time has trained, sampled, saved and charged.
LEFT = Path(__file__).parent / "data" / "revision_0001.sql"
Row = dict[str, Any]


def read(connection: Connection) -> dict[Table, list[Row]]:
    """All rows of each table, with the columns that it has in this database."""
    found = {}
    for name in inspect(connection).get_table_names():
        if (table := Base.metadata.tables.get(name)) is not None:
            there = [table.c[column["name"]] for column in inspect(connection).get_columns(name)]
            found[table] = [dict(row) for row in connection.execute(select(*there)).mappings()]
    return found


def left(path: Path) -> dict[Table, list[Row]]:
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        command.upgrade(alembic_config(connection), "0001")
    with sqlite3.connect(path) as file:
        file.executescript(LEFT.read_text())
    with engine.connect() as connection:
        return read(connection)


def test_the_rows_of_a_server_of_the_first_revision_are_taken_over(any_database: Database, tmp_path: Path) -> None:
    rows = left(tmp_path / "left.db")
    with create_engine(any_database.url).begin() as connection:
        command.downgrade(alembic_config(connection), "0001")
        for table in (each for each in Base.metadata.sorted_tables if rows.get(each)):
            connection.execute(insert(table), rows[table])
        assert same(read(connection), rows)
    migrate(any_database)
    assert revision_of(create_engine(any_database.url)) == head()
    with create_engine(any_database.url).connect() as connection:
        assert same(read(connection), rows)
    with any_database.read() as session:
        assert_books(session)


def same(found: dict[Table, list[Row]], rows: dict[Table, list[Row]]) -> bool:
    """Whether `found` has each of `rows` as it was; a table may have more columns by now."""
    return all(
        sorted(repr([row[name] for name in sorted(given[0])]) for row in found[table])
        == sorted(repr([row[name] for name in sorted(row)]) for row in given)
        for table, given in rows.items()
        if given
    )


def assert_books(session: Session) -> None:
    assert session.scalars(select(Wallet.balance_nusd)).one() == 12_499_981_360
    assert session.scalar(select(func.sum(LedgerEntry.amount_nusd))) == 12_499_981_360
    assert session.scalar(select(func.sum(UsageEvent.amount_nusd))) == 18_640
    assert reconcile(session) == []
    verdict = audit.verify(session, session.scalars(select(Organisation.id)).one())
    assert (verdict.entries, verdict.problems) == (11, ())
