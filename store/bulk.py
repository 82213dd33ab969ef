"""Many rows in few statements, and few round trips: for the paths of every operation
(`scheduler.journal.accepting.acceptance`, `scheduler.journal.ending.settlement`, `billing.charges`).

On PostgreSQL rows travel as one JSON document, what is written waits and goes out as one statement, and a transaction
of the writer makes a trip only where somebody waits for an answer: `ask` sends what waits and the questions together,
any other statement sends what waits before it, and COMMIT goes with the last of it. SQLite has no round trips: all is
done at once, and `executemany` is as fast, without what SQLAlchemy does for each row.

Also here: locks of PostgreSQL, and the other statements that the two databases need in different forms.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import orjson
from sqlalchemy import ColumnElement, Connection, Dialect, Engine, Select, any_, bindparam, event, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from store.tables import Base

if TYPE_CHECKING:
    import psycopg

Rows = Sequence[dict[str, Any]]
#: A SELECT by dialect.
Question = dict[str, Select[Any]]
_SQLITE = sqlite.dialect()
_OUTBOX = "outbox"

_LOCK_ONE = "SELECT pg_advisory_xact_lock(hashtextextended(%s, 6))"
_LOCK = (
    "SELECT pg_advisory_xact_lock(key) FROM (SELECT DISTINCT hashtextextended(name, 6) AS key "
    "FROM unnest(CAST(%s AS text[])) AS name ORDER BY key) AS keys"
)
#: How PostgreSQL plans what batches ask: once, for to plan costs more than to do it; and by index, for they name their
#: rows, and a plan of when a table was small is kept until statistics are taken.
_PLANS = (
    "(SELECT set_config('plan_cache_mode', 'force_generic_plan', true)), "
    "(SELECT set_config('enable_seqscan', 'off', true))"
)


def insert_rows(connection: Connection, table: type[Base], rows: Rows, add: tuple[str, ...] = ()) -> None:
    """Insert rows that all have the same columns. With `add`, those columns are added to the row that is there already,
    by the primary key."""
    names = tuple(rows[0])
    if connection.dialect.name == "postgresql":
        _outbox(connection).put(_insert(table, names, add), orjson.dumps(rows).decode(), table=table.__tablename__)
    else:
        connection.exec_driver_sql(_insert_one(table, names, add), _values(table, names, rows))


def update_rows(connection: Connection, table: type[Base], rows: Rows, key: tuple[str, ...] = ("id",)) -> None:
    """Update rows by their `key`, each once; all have the same columns."""
    names = tuple(name for name in rows[0] if name not in key)
    if connection.dialect.name == "postgresql":
        firsts = sorted({row[key[0]] for row in rows})
        statement = _update(table, names, key)
        _outbox(connection).put(statement, orjson.dumps(rows).decode(), firsts, table=table.__tablename__)
    else:
        connection.exec_driver_sql(_update_one(table, names, key), _values(table, (*names, *key), rows))


def ask(connection: Connection, *questions: tuple[Question, dict[str, Any]]) -> list[list[Any]]:
    """The rows that each question finds with its parameters. None depends on the answer of another."""
    if connection.dialect.name == "postgresql":
        compiled = [(_compiled(forms["postgresql"], connection.dialect), params) for forms, params in questions]
        return _outbox(connection).send(connection, [(text, given | params) for (text, given), params in compiled])
    return [list(connection.execute(forms["sqlite"], params)) for forms, params in questions]


def take_locks(connection: Connection | Session, names: Collection[str]) -> None:
    """Wait until nobody else has any of these locks, in any process, and have them until the transaction ends. In one
    order, so that two who want several never wait for each other. SQLite has one writer at a time anyway."""
    dialect = connection.get_bind().dialect if isinstance(connection, Session) else connection.dialect
    if names and dialect.name == "postgresql":
        connection.execute(text(_LOCK.replace("%s", ":names")), {"names": sorted(names)})


def lock_first(connection: Connection, names: list[str], *, batches: bool) -> None:
    """`take_locks` before whatever comes next in this transaction of the writer; of `batches` alone, what comes is
    planned as they need it."""
    if connection.dialect.name == "postgresql":
        lock, given = (_LOCK_ONE, names[0]) if len(names) == 1 else (_LOCK, names)
        _outbox(connection).put(lock.replace("SELECT", f"SELECT {_PLANS},", 1) if batches else lock, given)


def send_now(connection: Connection) -> None:
    """Have what waits done, and raise what is wrong with it, while its savepoint can still be undone."""
    if connection.dialect.name == "postgresql":
        _outbox(connection).send_before(connection)


def among(column: Any, name: str) -> dict[str, ColumnElement[bool]]:
    """By dialect: whether a column is one of the values of parameter `name`. On PostgreSQL that is one array, so that
    the statement is the same for any number of values, and prepared."""
    array = bindparam(name, type_=postgresql.ARRAY(column.type))
    return {"postgresql": column == any_(array), "sqlite": column.in_(bindparam(name, expanding=True))}


def insert_into(session: Session, table: type[Base]) -> postgresql.Insert:
    """An INSERT with `on_conflict_do_nothing` and `on_conflict_do_update`, on either database. Do not look at its
    `rowcount`, which is -1 with psycopg: use `.returning`."""
    if session.get_bind().dialect.name == "sqlite":
        return sqlite.insert(table)  # type: ignore[return-value]
    return postgresql.insert(table)


# ---- round trips of PostgreSQL


@dataclass(frozen=True)
class _Statement:
    """`table`: what it writes, if it may be part of one with others."""

    text: str
    params: tuple[Any, ...]
    table: str | None


class Outbox:
    """What one connection of the writer has to send before anything else, and at the latest with COMMIT."""

    def __init__(self) -> None:
        self._waiting: list[_Statement] = []

    def clear(self) -> None:
        self._waiting = []

    def put(self, text: str, *params: Any, table: str | None = None) -> None:
        self._waiting.append(_Statement(text, params, table))

    def send(
        self, connection: Connection, questions: Sequence[tuple[str, dict[str, Any]]] = (), *, commit: bool = False
    ) -> list[list[Any]]:
        """Send what waits, the questions behind it, and COMMIT if asked, in one trip. Raises what SQLAlchemy would."""
        import psycopg  # which SQLAlchemy has loaded by then

        statements, self._waiting = _together(self._waiting), []
        driver = connection.connection.driver_connection
        assert isinstance(driver, psycopg.Connection)
        all_of_it = [*statements, *questions, *([("COMMIT", ())] if commit else [])]
        try:
            with driver.pipeline() if len(all_of_it) > 1 else nullcontext():
                cursors = [driver.execute(text, params or None) for text, params in all_of_it]  # type: ignore[arg-type]
            return [cursor.fetchall() for cursor in cursors[len(statements) :][: len(questions)]]
        except psycopg.Error as error:
            raise _as_sqlalchemy(connection, driver, error) from error

    def send_before(self, connection: Connection, *_statement: Any) -> None:
        if self._waiting:
            self.send(connection)

    def commit(self, connection: Connection) -> None:
        if [statement.text for statement in self._waiting] == ["BEGIN"]:
            self.clear()  # nothing was done
        elif self._waiting:
            self.send(connection, commit=True)


def _together(waiting: list[_Statement]) -> list[tuple[str, tuple[Any, ...]]]:
    """What is written without a break becomes one statement; its parts do not see each other's rows, so each table is
    in it once."""
    groups: list[list[_Statement]] = []
    for statement in waiting:
        tables = {other.table for other in groups[-1]} if groups else {None}
        if statement.table is None or statement.table in tables or None in tables:
            groups.append([])
        groups[-1].append(statement)
    return [
        (_joined(tuple(part.text for part in parts)), tuple(param for part in parts for param in part.params))
        for parts in groups
    ]


@cache
def _joined(parts: tuple[str, ...]) -> str:
    *others, last = parts
    before = ", ".join(f"part_{number} AS ({part})" for number, part in enumerate(others))
    return f"WITH {before} {last}" if before else last


def _as_sqlalchemy(connection: Connection, driver: psycopg.Connection[Any], error: psycopg.Error) -> Exception:
    lost = driver.closed
    if lost and not connection.invalidated:
        connection.invalidate(error)
    found: Exception = DBAPIError.instance(
        None, None, error, type(error), dialect=connection.dialect, connection_invalidated=lost
    )
    return found


def _outbox(connection: Connection) -> Outbox:
    outbox = connection.info[_OUTBOX]
    assert isinstance(outbox, Outbox)
    return outbox


def make_few_trips(engine: Engine) -> None:
    """Prepare PostgreSQL's writer, whose connections are open in autocommit mode: BEGIN is ours, too."""

    @event.listens_for(engine, "connect")
    def connect(_connection: Any, record: Any) -> None:
        record.info[_OUTBOX] = Outbox()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        _outbox(connection).put("BEGIN")

    @event.listens_for(engine, "before_cursor_execute")
    def execute(connection: Connection, *_: Any) -> None:
        _outbox(connection).send_before(connection)

    @event.listens_for(engine, "rollback")
    @event.listens_for(engine, "rollback_savepoint")
    def undo(connection: Connection, *_: Any) -> None:
        if not connection.invalidated:
            _outbox(connection).clear()

    @event.listens_for(engine, "commit")
    def commit(connection: Connection) -> None:
        _outbox(connection).commit(connection)


# ---- statements


@cache
def _compiled(question: Select[Any], dialect: Dialect) -> tuple[str, dict[str, Any]]:
    """For psycopg: the text, and the parameters that have their value already."""
    compiled = question.compile(dialect=dialect)
    return str(compiled), {name: value for name, value in compiled.params.items() if value is not None}


@cache
def _insert(table: type[Base], names: tuple[str, ...], add: tuple[str, ...]) -> str:
    name, columns = table.__tablename__, ", ".join(names)
    return f"INSERT INTO {name} ({columns}) SELECT {columns} FROM {_rows(name)} AS new{_adding(table, add)}"  # noqa: S608


@cache
def _update(table: type[Base], names: tuple[str, ...], key: tuple[str, ...]) -> str:
    """Named once more by an array, the rows are found by index whatever PostgreSQL thinks of the table's size."""
    name = table.__tablename__
    values = ", ".join(f"{column} = new.{column}" for column in names)
    same = " AND ".join(f"{name}.{column} = new.{column}" for column in key)
    among = f"{name}.{key[0]} = ANY (CAST(%s AS varchar[]))"
    return f"UPDATE {name} SET {values} FROM {_rows(name)} AS new WHERE {same} AND {among}"  # noqa: S608


def _rows(name: str) -> str:
    return f"json_populate_recordset(CAST(NULL AS {name}), CAST(%s AS json))"


def _adding(table: type[Base], add: tuple[str, ...]) -> str:
    if not add:
        return ""
    key = ", ".join(column.name for column in table.__table__.primary_key)
    sums = ", ".join(f"{column} = {table.__tablename__}.{column} + excluded.{column}" for column in add)
    return f" ON CONFLICT ({key}) DO UPDATE SET {sums}"


@cache
def _insert_one(table: type[Base], names: tuple[str, ...], add: tuple[str, ...]) -> str:
    places = ", ".join("?" * len(names))
    return f"INSERT INTO {table.__tablename__} ({', '.join(names)}) VALUES ({places}){_adding(table, add)}"  # noqa: S608


@cache
def _update_one(table: type[Base], names: tuple[str, ...], key: tuple[str, ...]) -> str:
    values = ", ".join(f"{name} = ?" for name in names)
    same = " AND ".join(f"{name} = ?" for name in key)
    return f"UPDATE {table.__tablename__} SET {values} WHERE {same}"  # noqa: S608


def _values(table: type[Base], names: tuple[str, ...], rows: Rows) -> list[tuple[Any, ...]]:
    """Rows as SQLite stores them, each in the order of `names`."""
    forms = _forms(table, names)
    return [tuple([row[name] if form is None else form(row[name]) for name, form in forms]) for row in rows]


@cache
def _forms(table: type[Base], names: tuple[str, ...]) -> list[tuple[str, Callable[[Any], Any] | None]]:
    """How each column's type turns a value into one of SQLite's; None: it stays as it is."""
    types = ((name, table.__table__.c[name].type.dialect_impl(_SQLITE)) for name in names)
    return [(name, type.bind_processor(_SQLITE)) for name, type in types]
