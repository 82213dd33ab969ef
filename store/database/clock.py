"""The time that all processes on one database agree on."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session


def clock(session: Session) -> datetime:
    """The database's present time: the clocks of replicas may differ, and be set."""
    if session.connection().dialect.name == "sqlite":  # SQLite is used by one machine, whose clock it is
        return datetime.now(UTC)
    now: datetime = session.execute(select(func.clock_timestamp())).scalar_one()
    return now.astimezone(UTC)
