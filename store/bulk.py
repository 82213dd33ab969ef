"""Statements that PostgreSQL and SQLite need in different forms: many rows in few round trips, INSERT ... ON CONFLICT.

On PostgreSQL many rows travel as one JSON document in one statement, and statements whose results nobody reads go out
together; SQLite has no round trips, and `executemany` is as fast, without what SQLAlchemy does for each row. For the
paths of every operation (`scheduler.journal.accepting.acceptance`, `scheduler.journal.ending.settlement`,
`billing.charges`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import orjson
from sqlalchemy import ColumnElement, Connection, TextClause, any_, bindparam, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from store.tables import Base

Rows = Sequence[dict[str, Any]]
_SQLITE = sqlite.dialect()


def insert_rows(connection: Connection, table: type[Base], rows: Rows) -> None:
    """Insert rows that all have the same columns."""
    if connection.dialect.name == "postgresql":
        connection.execute(_insert(table, tuple(rows[0])), {"rows": orjson.dumps(rows).decode()})
    else:
        names = tuple(rows[0])
        connection.exec_driver_sql(_insert_one(table, names), _values(table, names, rows))


def update_rows(connection: Connection, table: type[Base], rows: Rows) -> None:
    """Update rows by their `id`; all have the same columns."""
    if connection.dialect.name == "postgresql":
        connection.execute(_update(table, tuple(rows[0])), {"rows": orjson.dumps(rows).decode()})
    else:
        names = tuple(name for name in rows[0] if name != "id")
        connection.exec_driver_sql(_update_one(table, names), _values(table, (*names, "id"), rows))


def among(column: Any, name: str) -> dict[str, ColumnElement[bool]]:
    """By dialect: whether a column is one of the values of parameter `name`. On PostgreSQL that is one array, so that
    the statement is the same for any number of values, and prepared."""
    array = bindparam(name, type_=postgresql.ARRAY(column.type))
    return {"postgresql": column == any_(array), "sqlite": column.in_(bindparam(name, expanding=True))}


@contextmanager
def sent_together(connection: Connection) -> Iterator[None]:
    """Statements in here return no rows and depend on no answer: PostgreSQL is waited for once, at the end."""
    if connection.dialect.name != "postgresql":
        yield
        return
    import psycopg  # which SQLAlchemy has loaded by then

    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    try:
        with driver.pipeline():
            yield
    except psycopg.Error as error:  # as SQLAlchemy would say it
        raise DBAPIError.instance(None, None, error, psycopg.Error, dialect=connection.dialect) from error


@cache
def _insert(table: type[Base], names: tuple[str, ...]) -> TextClause:
    name, columns = table.__tablename__, ", ".join(names)
    return text(f"INSERT INTO {name} ({columns}) SELECT {columns} FROM {_rows(name)}")  # noqa: S608


@cache
def _update(table: type[Base], names: tuple[str, ...]) -> TextClause:
    name = table.__tablename__
    values = ", ".join(f"{column} = new.{column}" for column in names if column != "id")
    return text(f"UPDATE {name} SET {values} FROM {_rows(name)} AS new WHERE {name}.id = new.id")  # noqa: S608


def _rows(name: str) -> str:
    return f"json_populate_recordset(CAST(NULL AS {name}), CAST(:rows AS json))"


@cache
def _insert_one(table: type[Base], names: tuple[str, ...]) -> str:
    places = ", ".join("?" * len(names))
    return f"INSERT INTO {table.__tablename__} ({', '.join(names)}) VALUES ({places})"  # noqa: S608


@cache
def _update_one(table: type[Base], names: tuple[str, ...]) -> str:
    values = ", ".join(f"{name} = ?" for name in names)
    return f"UPDATE {table.__tablename__} SET {values} WHERE id = ?"  # noqa: S608


def _values(table: type[Base], names: tuple[str, ...], rows: Rows) -> list[tuple[Any, ...]]:
    """Rows as SQLite stores them, each in the order of `names`."""
    forms = _forms(table, names)
    return [tuple([row[name] if form is None else form(row[name]) for name, form in forms]) for row in rows]


@cache
def _forms(table: type[Base], names: tuple[str, ...]) -> list[tuple[str, Callable[[Any], Any] | None]]:
    """How each column's type turns a value into one of SQLite's; None: it stays as it is."""
    types = ((name, table.__table__.c[name].type.dialect_impl(_SQLITE)) for name in names)
    return [(name, type.bind_processor(_SQLITE)) for name, type in types]


def insert_into(session: Session, table: type[Base]) -> postgresql.Insert:
    """An INSERT with `on_conflict_do_nothing` and `on_conflict_do_update`, on either database. Do not look at its
    `rowcount`, which is -1 with psycopg: use `.returning`."""
    if session.get_bind().dialect.name == "sqlite":
        return sqlite.insert(table)  # type: ignore[return-value]
    return postgresql.insert(table)
