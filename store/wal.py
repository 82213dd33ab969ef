"""Write-ahead logging of SQLite, turned on while others open the same file."""

from __future__ import annotations

import sqlite3
import time

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
