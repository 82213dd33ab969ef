"""The database of a backup: a consistent copy, taken while others write; and put back.

SQLite is copied with its backup API, into a file that is checked. PostgreSQL is dumped by pg_dump from an exported
snapshot, in which the caller can still read, so the files that rows name are looked up in exactly the saved state.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, func, inspect, make_url, select, table, text
from sqlalchemy.orm import Session

from store.backup.files import BadBackup
from store.database.row_security import make_roles

#: The name of the copy: of SQLite a database, of PostgreSQL pg_dump's custom format.
SQLITE_FILE, DUMP_FILE = "weft.db", "weft.dump"


@contextmanager
def opened(url: str, **options: Any) -> Iterator[Engine]:
    """The database, for a few queries: its connections are closed with the block."""
    engine = create_engine(url, **options)
    try:
        yield engine
    finally:
        engine.dispose()


def is_sqlite(url: str) -> bool:
    return make_url(url).get_backend_name() == "sqlite"


def file_name(url: str) -> str:
    return SQLITE_FILE if is_sqlite(url) else DUMP_FILE


@contextmanager
def saved(url: str, target: Path) -> Iterator[Session]:
    """Save the database in `target`. Yields a session on the saved state before the slow part begins."""
    if is_sqlite(url):
        _copy_sqlite(Path(make_url(url).database or ""), target)
        try:
            with opened(f"sqlite:///{target}") as engine, Session(engine) as session:
                yield session
        finally:
            check_sqlite(target)
        return
    with opened(url, isolation_level="REPEATABLE READ") as engine, Session(engine) as session:
        for limit in ("idle_in_transaction_session_timeout", "statement_timeout"):  # as pg_dump does for itself
            session.execute(text(f"SET LOCAL {limit} = 0"))
        snapshot = session.scalar(text("SELECT pg_export_snapshot()"))
        yield session
        # Row-level security is obeyed, not refused: the login sees all rows, as a member of weft_service.
        options = ("--format=custom", "--no-owner", "--enable-row-security", f"--snapshot={snapshot}")
        _postgres("pg_dump", url, *options, f"--file={target}")


def _copy_sqlite(source: Path, target: Path) -> None:
    try:
        with closing(sqlite3.connect(source)) as reading, closing(sqlite3.connect(target)) as writing:
            reading.execute("PRAGMA busy_timeout=30000")
            reading.backup(writing)  # in one step, and so in one read transaction, which holds up no writer
            writing.execute("PRAGMA journal_mode=DELETE")
    except sqlite3.DatabaseError as error:
        raise BadBackup(f"{source} cannot be copied to {target}: {error}") from None


def check_sqlite(file: Path) -> None:
    try:
        with closing(sqlite3.connect(file)) as reading:
            (found,) = reading.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        found = str(error)
    if found != "ok":
        raise BadBackup(f"{file} is damaged: {found}")


def rows_of(session: Session) -> dict[str, int]:
    """The number of rows in each table. It is stored in the backup, and checked when that is restored."""
    names = inspect(session.connection()).get_table_names()
    return {name: session.scalar(select(func.count()).select_from(table(name))) or 0 for name in sorted(names)}


def put_back(url: str, source: Path) -> dict[str, int]:
    """Fill the empty database at `url` with what was saved; returns its `rows_of`."""
    if is_sqlite(url):
        target = Path(make_url(url).database or "")
        check_sqlite(source)
        os.replace(source, target)
    else:
        with opened(url) as engine, engine.begin() as connection:
            make_roles(connection)
        _postgres("pg_restore", url, "--no-owner", "--exit-on-error", "--single-transaction", str(source))
    with opened(url) as engine, Session(engine) as session:
        return rows_of(session)


def is_empty(url: str) -> bool:
    """True if the database at `url` has nothing that a restored one would overwrite."""
    if is_sqlite(url):
        return not Path(make_url(url).database or "").exists()
    with opened(url) as engine:
        return not inspect(engine).get_table_names()


def _postgres(program: str, url: str, *options: str) -> None:
    """Run one of PostgreSQL's programs on the database at `url`; its password is not on the command line."""
    path = shutil.which(program)
    if path is None:
        raise BadBackup(
            f"{program} is not installed: it comes with PostgreSQL's client (apt-get install postgresql-client)"
        )
    address = make_url(url)
    environment = dict(os.environ)
    if address.password is not None:
        environment["PGPASSWORD"] = str(address.password)
    plain = address.set(drivername="postgresql", password=None).render_as_string()
    ran = subprocess.run([path, f"--dbname={plain}", *options], env=environment, capture_output=True, text=True)
    if ran.returncode:
        raise BadBackup(f"{program}: {' '.join(ran.stderr.split())[-1000:]}")
