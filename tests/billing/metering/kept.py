"""Checkpoints that tests keep for a while, and what is billed for them."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy.orm import Session

from billing.metering import storage
from store import tables
from store.tables import Checkpoint
from tests.billing.conftest import START, Till
from tests.rows import run_row, session_row

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
GB = 10**9
#: A gigabyte for an hour, at $0.10 per GB-month.
GB_HOUR_NUSD = 138_889


def add_run(session: Session) -> None:
    session.add(session_row("a", START, project_id="p", key_id=1))
    session.flush()
    session.add(run_row("a", START, "r"))


def save(till: Till, at: datetime, name: str = "c", size: int = GB, begin: bool = True) -> None:
    def write(session: Session) -> None:
        row = Checkpoint(
            id=name, org_id="a", run_id="r", kind="weights", name=name, ref=f"weights/{name}", size_bytes=size,
            public=False, user_metadata={}, created_at=at, expires_at=None,
        )  # fmt: skip
        session.add(row)
        session.flush()
        if begin:
            storage.begin(session, row, at)

    till.database.write_now(write)


def delete(till: Till, at: datetime, name: str = "c", end: bool = True) -> None:
    def write(session: Session) -> None:
        row = session.get_one(Checkpoint, name)
        if end:
            storage.end(session, [row], at)
        session.delete(row)

    till.database.write_now(write)


def expire(till: Till, name: str, at: datetime) -> None:
    till.database.write_now(lambda session: setattr(session.get_one(Checkpoint, name), "expires_at", at))


def billed(till: Till) -> list[tuple[str, int, int]]:
    events = sorted(till.rows(tables.UsageEvent), key=lambda event: event.accepted_at)
    return [(f"{event.accepted_at:%H:%M}", event.quantity, event.amount_nusd) for event in events]
