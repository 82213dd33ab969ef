"""Bring a database to the newest revision, from any working directory.

The whole upgrade is one transaction under a lock, so a crash leaves the old tables and two processes that start
together upgrade once. A database that is there already costs one read: Alembic is not even imported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Engine, create_engine, event, not_, select, text
from sqlalchemy.exc import DatabaseError
from sqlalchemy.orm import Session

from store import tables
from store.database.clock import clock
from store.database.db import Database
from store.database.row_security import protect
from store.database.wal import use_wal

if TYPE_CHECKING:
    from alembic.config import Config

log = logging.getLogger(__name__)

#: Any number that no other program takes as an advisory lock in the same PostgreSQL database.
_LOCK = 0x77656674

_HERE = Path(__file__).parent


class CannotMigrate(RuntimeError):
    """The tables stay as they are; the message says what to do."""


class UnknownRevision(CannotMigrate):
    """They are of a revision that this program does not know."""


class InUse(CannotMigrate):
    """Servers of another version are at work on them."""


def migrate(database: Database, other_server: Callable[[], str | None] = lambda: None) -> None:
    """Bring the tables up to date; nothing happens when they are. Safe when two processes start at once. Raises
    LostCommits when this is not the newest state that the database has had, UnknownRevision when another version of
    Weft made it, and InUse while servers that share it have a leader, or while there is an `other_server` that has it
    for itself (its process)."""
    database.refuse_lost_commits()
    upgrade(database.url, other_server)


def alembic_config(connection: Connection | None = None) -> Config:
    """Alembic's configuration, found by where this package lies."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_HERE).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


@cache
def revisions() -> tuple[str, ...]:
    """The revisions that this program knows, oldest first; their files are named by number."""
    return tuple(sorted(file.name.partition("_")[0] for file in _HERE.glob("versions/[0-9]*_*.py")))


def head() -> str:
    """The newest of them."""
    return revisions()[-1]


def revision_of(engine: Engine) -> str | None:
    """The revision of a database; None if there are no tables at all, and what reads worse the upgrade will tell."""
    with engine.connect() as connection:
        try:
            return revision_in(connection)
        except DatabaseError:
            return None


def revision_in(connection: Connection) -> str | None:
    found = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return None if found is None else str(found)


def refuse_unknown(revision: str | None, what: str) -> None:
    """Raise UnknownRevision for `what` that this program has no tables for."""
    if revision is not None and revision not in revisions():
        raise UnknownRevision(
            f"{what} is of revision {revision[:32]}, and this weftd knows revisions up to {head()}: another version "
            "of Weft, most likely a newer one, made it. Use that version; or go back to a backup of before the upgrade "
            "(docs/operating.md)"
        )


def upgrade(url: str, other_server: Callable[[], str | None]) -> None:
    """`alembic upgrade head` on the database at `url`."""
    engine = create_engine(url)
    try:
        if engine.dialect.name == "sqlite":
            _own_transactions(engine)
        found = revision_of(engine)
        if found == head():
            return
        refuse_unknown(found, "the database")
        if found is not None and (process := other_server()) is not None:
            raise InUse(
                f"the database is of revision {found}, and weftd of another version (process {process}) is at work on "
                f"it: stop that, then start this one, or bring it to {head()} (`weftd migrate`)"
            )
        from alembic import command

        with engine.connect() as connection, connection.begin():
            if engine.dialect.name == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
            if found is not None and revision_in(connection) != head():
                _refuse_led(connection)
            command.upgrade(alembic_config(connection), "head")
            protect(connection)
            if engine.dialect.name == "sqlite":
                broken = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
                if broken:
                    raise RuntimeError(f"the migration would leave {len(broken)} rows with a broken foreign key")
        if found is not None:
            log.info("the database went from revision %s to %s", found, head())
    finally:
        engine.dispose()


def _refuse_led(connection: Connection) -> None:
    """Raise InUse while a server leads; none may begin to until this transaction is over."""
    lease = tables.JobLease
    leader = select(lease.name).where(lease.name == tables.LEADS)
    connection.execute(leader.with_for_update())
    now = clock(Session(connection))
    if connection.scalar(leader.where(not_(lease.over(now, tables.LEADS_S)))) is not None:
        raise InUse(
            f"the database is of revision {revision_in(connection)}, and servers that share it are at work: stop all "
            f"servers and workers, then bring it to {head()} (`weftd migrate`). A leader that was killed counts for "
            "some seconds more (docs/operating.md)"
        )


def _own_transactions(engine: Engine) -> None:
    """Foreign keys stay off while tables are copied (a batch migration drops the old one), and are checked after."""

    @event.listens_for(engine, "connect")
    def connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA busy_timeout=30000")
        use_wal(connection)
        connection.execute("PRAGMA foreign_keys=OFF")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
