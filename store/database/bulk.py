"""Many rows in few statements, and few round trips: for the paths of every operation
(`scheduler.journal.accepting.acceptance`, `scheduler.journal.ending.settlement`, `billing.metering.charges`).

On PostgreSQL rows travel as one JSON document, what is written waits and goes out as one statement, and a transaction
of the writer makes a trip only where somebody waits for an answer: `ask` sends what waits and the questions together,
any other statement sends what waits before it, and COMMIT goes with the last of it. SQLite has no round trips, and all
is done at once. But its driver gives other threads the interpreter for every step of a statement, so rows go in, and
come out, in one step there too. Also here: locks, and the other statements that the two need in different forms.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import orjson
from sqlalchemy import (
    ColumnElement,
    Connection,
    Dialect,
    Engine,
    Select,
    Text,
    TypeDecorator,
    any_,
    bindparam,
    event,
    func,
    select,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from sqlalchemy.types import TypeEngine

from store.database.standby import away, takes_no_writes
from store.database.wal import execute
from store.tables import Base

if TYPE_CHECKING:
    import psycopg

Rows = Sequence[dict[str, Any]]
#: A SELECT for each dialect.
Question = dict[str, Select[Any]]
Params = tuple[Any, ...] | dict[str, Any]
Check = Callable[[list[Any]], None]
_SQLITE = sqlite.dialect(paramstyle="named", json_serializer=lambda value: orjson.dumps(value).decode())
_POSTGRESQL = postgresql.dialect()  # type: ignore[no-untyped-call]
_OUTBOX = "outbox"
#: How many rows one statement of SQLite writes: it takes 32,766 values.
AT_ONCE = 64

_LOCK_ONE = "SELECT pg_advisory_xact_lock(hashtextextended(%s, 6))"
_LOCK = (
    "SELECT pg_advisory_xact_lock(key) FROM (SELECT DISTINCT hashtextextended(name, 6) AS key "
    "FROM unnest(CAST(%s AS text[])) AS name ORDER BY key) AS keys"
)
#: How PostgreSQL plans the statements of batches: once, since planning costs more than execution; and by index, since
#: they name their rows, and a plan made for a small table would be kept until statistics are taken.
_PLANS = (
    "(SELECT set_config('plan_cache_mode', 'force_generic_plan', true)), "
    "(SELECT set_config('enable_seqscan', 'off', true))"
)


def insert_rows(connection: Connection, table: type[Base], rows: Rows, add: tuple[str, ...] = ()) -> None:
    """Insert rows that all have the same columns. If a row with that primary key exists, the columns in `add` are added
    to it."""
    names = tuple(rows[0])
    if connection.dialect.name == "postgresql":
        document = orjson.dumps(rows).decode()
        _outbox(connection).put(_insert(table, names, add), (document,), table=table.__tablename__)
    else:
        for part, values in _parts(table, names, rows):
            execute(connection, _insert_many(table, names, add, part), values)


def update_rows(connection: Connection, table: type[Base], rows: Rows, key: tuple[str, ...] = ("id",)) -> None:
    """Update rows by their `key`, each once; all have the same columns."""
    names = tuple(name for name in rows[0] if name not in key)
    if connection.dialect.name == "postgresql":
        firsts = sorted({row[key[0]] for row in rows})
        statement = _update(table, names, key)
        _outbox(connection).put(statement, (orjson.dumps(rows).decode(), firsts), table=table.__tablename__)
    else:
        for part, values in _parts(table, (*names, *key), rows):
            execute(connection, _update_many(table, names, key, part), values)


def ask(connection: Connection, *questions: tuple[Question, dict[str, Any]]) -> list[list[Any]]:
    """The rows that each question finds with its parameters. No question may depend on the answer to another."""
    if connection.dialect.name == "postgresql":
        compiled = [(_compiled(forms["postgresql"], connection.dialect), params) for forms, params in questions]
        return _outbox(connection).send(connection, [(text, given | params) for (text, given), params in compiled])
    return [_ask_sqlite(connection, forms["sqlite"], params) for forms, params in questions]


def require(connection: Connection, question: Question, params: dict[str, Any], check: Check) -> None:
    """Call `check`, which may raise, with the rows that `question` finds; on PostgreSQL with the next statements."""
    if connection.dialect.name == "postgresql":
        text, given = _compiled(question["postgresql"], connection.dialect)
        _outbox(connection).put(text, given | params, check=check)
    else:
        check(_ask_sqlite(connection, question["sqlite"], params))


def make_sure(connection: Connection) -> None:
    """Run the checks of `require` that were not sent with another statement yet."""
    if connection.dialect.name == "postgresql":
        _outbox(connection).make_sure(connection)


def take_locks(connection: Connection | Session, names: Collection[str]) -> None:
    """Take these locks, in any process, until the transaction ends; waits until they are free. They are taken in a
    fixed order, so that two transactions never wait for each other. SQLite has a single writer anyway."""
    dialect = connection.get_bind().dialect if isinstance(connection, Session) else connection.dialect
    if names and dialect.name == "postgresql":
        connection.execute(text(_LOCK.replace("%s", ":names")), {"names": sorted(names)})


def lock_first(connection: Connection, names: list[str], *, batches: bool) -> None:
    """`take_locks` as the first statement of the writer's transaction. If it contains only `batches`, its statements
    are planned as batches need it."""
    if connection.dialect.name == "postgresql":
        lock, given = (_LOCK_ONE, names[0]) if len(names) == 1 else (_LOCK, names)
        _outbox(connection).put(lock.replace("SELECT", f"SELECT {_PLANS},", 1) if batches else lock, (given,))


def send_now(connection: Connection) -> None:
    """Send the waiting statements, and raise their errors, while the savepoint can still be undone."""
    if connection.dialect.name == "postgresql":
        _outbox(connection).send_before(connection)


def among(column: Any, name: str) -> dict[str, ColumnElement[bool]]:
    """By dialect: the condition that a column has one of the values in parameter `name`. The values are one array: a
    prepared statement serves any number."""
    array = bindparam(name, type_=postgresql.ARRAY(column.type))
    values = func.json_each(bindparam(name, type_=_Array(column.type))).table_valued("value")
    return {"postgresql": column == any_(array), "sqlite": column.in_(select(values.c.value))}


def insert_into(session: Session, table: type[Base]) -> postgresql.Insert:
    """An INSERT with `on_conflict_do_nothing` and `on_conflict_do_update`, on either database. Do not look at its
    `rowcount`, which is -1 with psycopg: use `.returning`."""
    if session.get_bind().dialect.name == "sqlite":
        return sqlite.insert(table)  # type: ignore[return-value]
    return postgresql.insert(table)


# ---- round trips of PostgreSQL


@dataclass(frozen=True)
class _Statement:
    """A statement to be sent. `table`: the table that it writes, if it may be joined with others."""

    text: str
    params: Params
    table: str | None = None
    check: Check | None = None


class Outbox:
    """The statements that wait on one of the writer's connections: sent before all else, at the latest with COMMIT."""

    def __init__(self) -> None:
        self._waiting: list[_Statement] = []

    def clear(self) -> None:
        self._waiting = []

    def make_sure(self, connection: Connection) -> None:
        if any(statement.check is not None for statement in self._waiting):
            self.send(connection)

    def put(self, text: str, params: Params = (), *, table: str | None = None, check: Check | None = None) -> None:
        self._waiting.append(_Statement(text, params, table, check))

    def send(
        self, connection: Connection, questions: Sequence[tuple[str, dict[str, Any]]] = (), *, commit: bool = False
    ) -> list[list[Any]]:
        """Send waiting statements, questions, and COMMIT if asked, in one round trip. Raises what SQLAlchemy would."""
        import psycopg  # SQLAlchemy has imported it by then

        statements, self._waiting = _together(self._waiting), []
        driver = connection.connection.driver_connection
        assert isinstance(driver, psycopg.Connection)
        asked = [_Statement(text, params) for text, params in questions]
        all_of_it = [*statements, *asked, *([_Statement("COMMIT", ())] if commit else [])]
        try:
            with driver.pipeline() if len(all_of_it) > 1 else nullcontext():
                cursors = [driver.execute(one.text, one.params or None) for one in all_of_it]
            for statement, cursor in zip(statements, cursors, strict=False):
                if statement.check is not None:
                    statement.check(cursor.fetchall())
            return [cursor.fetchall() for cursor in cursors[len(statements) :][: len(questions)]]
        except psycopg.Error as error:
            raise _as_sqlalchemy(connection, driver, error) from error

    def send_before(self, connection: Connection, *_statement: Any) -> None:
        if self._waiting:
            self.send(connection)

    def commit(self, connection: Connection) -> None:
        if [statement.text for statement in self._waiting] == ["BEGIN"]:
            self.clear()  # nothing was done in this transaction
        elif self._waiting:
            self.make_sure(connection)
            self.send(connection, commit=True)


def _together(waiting: list[_Statement]) -> list[_Statement]:
    """Join consecutive writes into one statement. Its parts do not see each other's rows, so each table is in it only
    once."""
    groups: list[list[_Statement]] = []
    for statement in waiting:
        tables = {other.table for other in groups[-1]} if groups else {None}
        if statement.table is None or statement.table in tables or None in tables:
            groups.append([])
        groups[-1].append(statement)
    return [parts[0] if len(parts) == 1 else _one(parts) for parts in groups]


def _one(parts: list[_Statement]) -> _Statement:
    texts, params = tuple(one.text for one in parts), tuple(value for one in parts for value in one.params)
    return _Statement(_joined(texts), params)


@cache
def _joined(parts: tuple[str, ...]) -> str:
    *others, last = parts
    before = ", ".join(f"part_{number} AS ({part})" for number, part in enumerate(others))
    return f"WITH {before} {last}"


def _as_sqlalchemy(connection: Connection, driver: psycopg.Connection[Any], error: psycopg.Error) -> Exception:
    lost = driver.closed or takes_no_writes(error)
    if lost and not connection.invalidated:
        connection.invalidate(error)
    if takes_no_writes(error):
        return away(error)
    instance: Callable[..., Exception] = DBAPIError.instance
    return instance(None, None, error, type(error), dialect=connection.dialect, connection_invalidated=lost)


def _outbox(connection: Connection) -> Outbox:
    outbox = connection.info[_OUTBOX]
    assert isinstance(outbox, Outbox)
    return outbox


def make_few_trips(engine: Engine) -> None:
    """Prepare PostgreSQL's writer. Its connections are in autocommit mode, because BEGIN is sent here, too."""

    @event.listens_for(engine, "connect")
    def connect(_connection: Any, record: Any) -> None:
        record.info[_OUTBOX] = Outbox()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        _outbox(connection).put("BEGIN")

    # First before SQLAlchemy begins with a statement: from there a check that fails passes through; later, it would end
    # the connection, and with it every other work of the transaction. Statements as text have only the second.
    @event.listens_for(engine, "before_execute")
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
    """A question for psycopg: its text, and the parameters that already have values."""
    compiled = question.compile(dialect=dialect)
    return str(compiled), {name: value for name, value in compiled.params.items() if value is not None}


@cache
def _insert(table: type[Base], names: tuple[str, ...], add: tuple[str, ...]) -> str:
    name, columns = table.__tablename__, ", ".join(names)
    return f"INSERT INTO {name} ({columns}) SELECT {columns} FROM {_rows(table, names)}{_adding(table, add)}"  # noqa: S608


@cache
def _update(table: type[Base], names: tuple[str, ...], key: tuple[str, ...]) -> str:
    """An array of the key values lets PostgreSQL find the rows by index, whatever size it thinks the table has."""
    name = table.__tablename__
    values = ", ".join(f"{column} = new.{column}" for column in names)
    same = " AND ".join(f"{name}.{column} = new.{column}" for column in key)
    among = f"{name}.{key[0]} = ANY (CAST(%s AS varchar[]))"
    return f"UPDATE {name} SET {values} FROM {_rows(table, (*key, *names))} WHERE {same} AND {among}"  # noqa: S608


def _rows(table: type[Base], names: tuple[str, ...]) -> str:
    """Rows as a table, of only these columns: PostgreSQL searches every row for each column."""
    types = ", ".join(f"{name} {table.__table__.c[name].type.compile(_POSTGRESQL)}" for name in names)
    return f"json_to_recordset(CAST(%s AS json)) AS new ({types})"


def _adding(table: type[Base], add: tuple[str, ...]) -> str:
    if not add:
        return ""
    key = ", ".join(column.name for column in table.__table__.primary_key)
    sums = ", ".join(f"{column} = {table.__tablename__}.{column} + excluded.{column}" for column in add)
    return f" ON CONFLICT ({key}) DO UPDATE SET {sums}"


@cache
def _insert_many(table: type[Base], names: tuple[str, ...], add: tuple[str, ...], rows: int) -> str:
    values = _places(len(names), rows)
    return f"INSERT INTO {table.__tablename__} ({', '.join(names)}) VALUES {values}{_adding(table, add)}"  # noqa: S608


@cache
def _update_many(table: type[Base], names: tuple[str, ...], key: tuple[str, ...], rows: int) -> str:
    name, new = table.__tablename__, {column: f"column{place}" for place, column in enumerate((*names, *key), 1)}
    values = ", ".join(f"{column} = {new[column]}" for column in names)
    same = " AND ".join(f"{name}.{column} = {new[column]}" for column in key)
    return f"UPDATE {name} SET {values} FROM (VALUES {_places(len(new), rows)}) WHERE {same}"  # noqa: S608


def _places(columns: int, rows: int) -> str:
    return ", ".join([f"({', '.join('?' * columns)})"] * rows)


def _parts(table: type[Base], names: tuple[str, ...], rows: Rows) -> Iterator[tuple[int, list[Any]]]:
    """For each statement: how many rows it has, and the rows' values in SQLite's form, in the order of `names`."""
    forms = _forms(table, names)
    for start in range(0, len(rows), AT_ONCE):
        part = rows[start : start + AT_ONCE]
        yield len(part), [row[name] if form is None else form(row[name]) for row in part for name, form in forms]


@cache
def _forms(table: type[Base], names: tuple[str, ...]) -> list[tuple[str, Callable[[Any], Any] | None]]:
    """How each column's type converts a value for SQLite; None if it needs no conversion."""
    return [(name, _to_sqlite(table.__table__.c[name].type)) for name in names]


def _to_sqlite(type: TypeEngine[Any]) -> Callable[[Any], Any] | None:
    found: TypeEngine[Any] = type.dialect_impl(_SQLITE)
    return found.bind_processor(_SQLITE)


class _Array(TypeDecorator[list[Any]]):
    """A list of values of another type as a JSON array, for `json_each`."""

    impl = Text
    cache_ok = True

    def __init__(self, of: TypeEngine[Any]) -> None:
        super().__init__()
        self.of = of

    def process_bind_param(self, value: list[Any] | None, dialect: Dialect) -> str:
        form = _to_sqlite(self.of)
        return orjson.dumps([one if form is None else form(one) for one in value or ()]).decode()


def _ask_sqlite(connection: Connection, question: Select[Any], params: dict[str, Any]) -> list[Any]:
    statement, given, forms, readers = _in_one_row(question)
    ((found,),) = execute(connection, statement, given | {name: forms[name](value) for name, value in params.items()})
    return [
        [value if read is None else read(value) for value, read in zip(row, readers, strict=True)]
        for row in orjson.loads(found)
    ]


@cache
def _in_one_row(question: Select[Any]) -> tuple[str, dict[str, Any], dict[str, Any], list[Any]]:
    """The statement that gathers all rows of a question in one JSON document; the parameters that already have values;
    the conversions of the other parameters for SQLite; and those of each column's values into its type."""
    columns = list(question.selected_columns)
    one = question.with_only_columns(func.json_group_array(func.json_array(*columns)), maintain_column_froms=True)
    compiled = one.compile(dialect=_SQLITE)
    given = {name: value for name, value in compiled.params.items() if value is not None}
    asked = ((compiled.bind_names[bind], bind.type) for bind in compiled.binds.values())
    forms = {name: _to_sqlite(type) or (lambda value: value) for name, type in asked if name not in given}
    return str(compiled), given, forms, [_from_sqlite(column.type) for column in columns]


def _from_sqlite(type: TypeEngine[Any]) -> Callable[[Any], Any] | None:
    found: TypeEngine[Any] = type.dialect_impl(_SQLITE)
    return found.result_processor(_SQLITE, None)
