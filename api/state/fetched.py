"""Which results clients were given: noted in memory, written now and then by housekeeping, so that no request waits for
it. What a crash loses counts as never fetched, and is kept for longer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from itertools import islice

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from store.database.clock import clock
from store.database.db import Database
from store.tables import Operation

#: Results written down in one go, so that other writers need not wait long.
FLUSH_ROWS = 500
#: Results of an organisation noted between two rounds; more are not noted, and kept as if they had not been fetched.
MAX_NOTED = 20_000


class Fetched:
    """Lives in the event loop. It is written by the database's time, by which results go; `clock` is a test's own."""

    def __init__(self, database: Database, clock: Callable[[], datetime] | None = None) -> None:
        self._database = database
        self._clock = clock
        self._noted: defaultdict[str, set[str]] = defaultdict(set)

    def note(self, org_id: str, request_ids: Iterable[str]) -> None:
        """A client of this organisation has these results. Ids that are none of its results mean nothing."""
        noted = self._noted[org_id]
        noted.update(
            islice((request_id for request_id in request_ids if request_id not in noted), MAX_NOTED - len(noted))
        )

    async def flush(self) -> int:
        """Write what is new; how many results that were."""
        noted, self._noted = self._noted, defaultdict(set)
        written, now = 0, self._clock() if self._clock is not None else None
        for org_id, request_ids in noted.items():
            ids = sorted(request_ids)
            for start in range(0, len(ids), FLUSH_ROWS):
                part = ids[start : start + FLUSH_ROWS]
                written += await self._database.write(partial(_write, org_id=org_id, request_ids=part, now=now))
        return written


def _write(session: Session, org_id: str, request_ids: list[str], now: datetime | None) -> int:
    """In order of the rows, and past those that another server has in hand, so that no two wait for each other."""
    row = Operation
    # Looked up by id alone: SQLite would rather go through all operations of the organisation.
    fresh = select(row.id, row.org_id).where(row.id.in_(request_ids), row.state != "queued", row.fetched_at.is_(None))
    found = session.execute(fresh.order_by(row.id).with_for_update(skip_locked=True))
    ids = [request_id for request_id, owner in found if owner == org_id]
    if ids:
        session.execute(update(row).where(row.id.in_(ids)).values(fetched_at=now or clock(session)))
    return len(ids)
