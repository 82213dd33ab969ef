"""Alembic's entry. The server upgrades through `migrations.upgrade`, which passes its connection; a developer who
writes a new revision names the database:
`WEFT_DATABASE_URL=sqlite:///x.db .venv/bin/alembic revision --autogenerate -m ...`."""

from __future__ import annotations

import os
from typing import Any, Literal

from alembic import context
from sqlalchemy import Connection, create_engine

from store.tables import Base, Utc


def render(kind: str, thing: Any, _context: Any) -> str | Literal[False]:
    """A revision must not change when a type of ours does, so it is written down as what it is in SQL."""
    return "sa.DateTime(timezone=True)" if kind == "type" and isinstance(thing, Utc) else False


def run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        render_as_batch=True,  # SQLite cannot alter most of a table in place
        transactional_ddl=True,
        render_item=render,
        compare_type=True,
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    with create_engine(os.environ["WEFT_DATABASE_URL"]).connect() as opened:
        run(opened)
