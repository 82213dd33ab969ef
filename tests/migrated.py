"""A database with all tables for one test alone. They are made once a process: that takes a fifth of a second."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from migrations.upgrade import migrate
from store.database.db import Database


def database_in(folder: Path) -> Database:
    """The database of a data folder: as it was left, or with no rows."""
    path = folder / "weft.db"
    if not path.exists():
        path.write_bytes(_empty())
    return Database(f"sqlite:///{path}")


@cache
def _empty() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weft.db"
        database = Database(f"sqlite:///{path}")
        migrate(database)
        database.close()
        return path.read_bytes()
