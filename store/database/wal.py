"""Opening SQLite: write-ahead logging, also while other processes open the same file; and running statements without
SQLAlchemy."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import DBAPIError

#: Another process may hold the lock of SQLite for a moment (`weftd key create` beside a server).
BUSY_TIMEOUT_MS = 30_000


def use_wal(connection: sqlite3.Connection) -> None:
    """Let readers and a writer work at the same time. The setting stays in the database; during the first change other
    connections get "locked" at once, whatever their busy timeout, and must try again."""
    deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def prepare_sqlite(engine: Engine, *, begin: str, durable: bool, query_only: bool) -> None:
    """Make SQLAlchemy, not the driver, begin transactions; and set SQLite's options of each connection."""

    @event.listens_for(engine, "connect")
    def connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
        use_wal(connection)
        connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute(f"PRAGMA query_only={'ON' if query_only else 'OFF'}")
        if not query_only:  # keep the undo log of a statement with many rows in memory, instead of a file beyond 64 KiB
            connection.execute("PRAGMA temp_store=MEMORY")

    @event.listens_for(engine, "begin")
    def start(connection: Connection) -> None:
        execute(connection, begin)


def execute(connection: Connection, statement: str, params: Sequence[Any] | dict[str, Any] = ()) -> list[Any]:
    """Run a statement on SQLite's own driver; values are as SQLite stores them. SQLAlchemy's work for each statement
    takes ten times as long as most statements of an operation. Raises what SQLAlchemy would."""
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    try:
        return driver.execute(statement, params).fetchall()
    except sqlite3.Error as error:
        found: Exception = DBAPIError.instance(None, None, error, sqlite3.Error, dialect=connection.dialect)
        raise found from error
