"""How SQLite is opened: with write-ahead logging, turned on while others open the same file."""

from __future__ import annotations

import sqlite3
import time
from typing import Any

from sqlalchemy import Connection, Engine, event

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
    """Have SQLAlchemy, not the driver, begin transactions; and set what SQLite keeps for each connection."""

    @event.listens_for(engine, "connect")
    def connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
        use_wal(connection)
        connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute(f"PRAGMA query_only={'ON' if query_only else 'OFF'}")

    @event.listens_for(engine, "begin")
    def start(connection: Connection) -> None:
        connection.exec_driver_sql(begin)
