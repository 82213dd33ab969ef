"""INSERT ... ON CONFLICT on either database. Never look at `rowcount`: psycopg answers -1; ask for `.returning`."""

from __future__ import annotations

from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from store.tables import Base


def insert_into(session: Session, table: type[Base]) -> postgresql.Insert:
    """An INSERT that has `on_conflict_do_nothing` and `on_conflict_do_update`, which both dialects spell alike."""
    if session.get_bind().dialect.name == "sqlite":
        return sqlite.insert(table)  # type: ignore[return-value]
    return postgresql.insert(table)
