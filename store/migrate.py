"""Bring a database to the newest revision, from any working directory.

The whole upgrade is one transaction under a lock, so a crash leaves the old tables and two processes that start
together upgrade once.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event, text

import migrations
from store.row_security import protect
from store.wal import use_wal

#: Any number that no other program takes as an advisory lock in the same PostgreSQL database.
_LOCK = 0x77656674


def alembic_config(connection: Connection | None = None) -> Config:
    """Alembic's configuration, found by where the package `migrations` lies."""
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


@cache
def head() -> str:
    """The newest revision that this program knows."""
    return ScriptDirectory.from_config(alembic_config()).get_current_head() or ""


def upgrade(url: str) -> None:
    """`alembic upgrade head` on the database at `url`."""
    engine = create_engine(url)
    try:
        if engine.dialect.name == "sqlite":
            _own_transactions(engine)
        with engine.connect() as connection, connection.begin():
            if engine.dialect.name == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
            command.upgrade(alembic_config(connection), "head")
            protect(connection)
            if engine.dialect.name == "sqlite":
                broken = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
                if broken:
                    raise RuntimeError(f"the migration would leave {len(broken)} rows with a broken foreign key")
    finally:
        engine.dispose()


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
