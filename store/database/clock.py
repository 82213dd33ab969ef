"""The time that all who share a database agree on."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session


def clock(session: Session) -> datetime:
    """Now, as the database says: replicas' own clocks may differ, and be set."""
    if session.connection().dialect.name == "sqlite":  # has the clock of its one machine
        return datetime.now(UTC)
    now: datetime = session.execute(select(func.clock_timestamp())).scalar_one()
    return now.astimezone(UTC)
