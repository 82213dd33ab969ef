"""The number of commits of an SQLite database, kept in it and in a file beside it.

SQLite does not notice when the end of its write-ahead log is missing or an older copy was put back: it shows an earlier
state. The count in the database is part of each commit (`PRAGMA user_version`); the file is written after it. So a
database whose count is below the file's has lost commits that were reported as durable.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from sqlalchemy.engine import make_url

#: user_version is a signed 32-bit number.
_MOST = 2**31 - 1


class LostCommits(RuntimeError):
    """The database is not in its newest state; the message says what to do."""


class CommitMark:
    def __init__(self, database: Path) -> None:
        self._database = database
        self._file = database.with_name(f"{database.name}-commits")
        self._descriptor: int | None = None

    @classmethod
    def of(cls, url: str) -> CommitMark | None:
        """The mark of a database by URL; None for PostgreSQL, which needs none, and for a database in memory."""
        parsed = make_url(url)
        if parsed.get_backend_name() != "sqlite" or not parsed.database or parsed.database == ":memory:":
            return None
        return cls(Path(parsed.database))

    @staticmethod
    def next(count: int) -> int:
        return count % _MOST + 1

    def write(self, count: int) -> None:
        """Write the count after a commit. If a crash prevents it, the file's count is too low, which is harmless."""
        if self._descriptor is None:
            self._descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o600)
        os.pwrite(self._descriptor, f"{count:020d}\n".encode(), 0)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def check(self) -> None:
        """Raise LostCommits if the database is gone, or behind its file. Other processes may be writing to it."""
        marked = self._marked()  # read before the database's count, which only grows
        if not marked:
            return
        folder = self._database.parent
        if not self._database.is_file() or not self._database.stat().st_size:
            raise LostCommits(
                f"{self._database.name} is missing in {folder}, where a database of {marked} commits was: put it back "
                "from a backup, or serve another folder"
            )
        count = self._count()
        if 0 < (marked - count) % _MOST < _MOST // 2:
            raise LostCommits(
                f"the database in {folder} has lost commits: it stands at {count}, and {marked} were made (its "
                f"write-ahead log was cut, or an older copy was put back). Put the right {self._database.name} and "
                f"{self._database.name}-wal back; or accept the loss with `weftd repair --data-dir {folder}`, which "
                "ends the runs that may have lost operations"
            )

    def accept(self) -> None:
        """Accept the database's state as the newest."""
        self.write(self._count())

    def _marked(self) -> int:
        try:
            return int(self._file.read_bytes() or b"0")
        except (FileNotFoundError, ValueError):
            return 0

    def _count(self) -> int:
        with closing(sqlite3.connect(self._database)) as connection:
            (count,) = connection.execute("PRAGMA user_version").fetchone()
        return int(count)
