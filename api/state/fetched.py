"""Which results clients were given: noted in memory, written now and then by housekeeping, so that no request waits for
it. What a crash loses counts as never fetched, and is kept for longer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import partial

from sqlalchemy import select, update
from sqlalchemy.orm import Session, load_only

from api.who.may_change import is_own
from api.who.principal import Principal
from store.database.clock import clock
from store.database.db import Database
from store.tables import Operation

#: How many results one write notes, so that other writers need not wait long.
FLUSH_ROWS = 500
#: How many results of an organisation are noted between two rounds; others are kept as if they had not been fetched.
MAX_NOTED = 20_000


class Fetched:
    """Lives in the event loop. Times are the database's, by which results are deleted; tests pass a `clock` of their
    own."""

    def __init__(self, database: Database, clock: Callable[[], datetime] | None = None) -> None:
        self._database = database
        self._clock = clock
        #: By organisation, then by result: the client that has fetched the result.
        self._noted: defaultdict[str, dict[str, Principal]] = defaultdict(dict)

    def note(self, who: Principal, request_ids: Iterable[str]) -> None:
        """A client of `who` has these results. Unknown ids are ignored; so are results of colleagues, who still want
        them."""
        noted = self._noted[who.org_id]
        for request_id in request_ids:
            if len(noted) >= MAX_NOTED and request_id not in noted:
                break
            noted[request_id] = who

    async def flush(self) -> int:
        """Write what is new. Returns how many results that were."""
        noted, self._noted = self._noted, defaultdict(dict)
        written, now = 0, self._clock() if self._clock is not None else None
        for by in noted.values():
            ids = sorted(by)
            for start in range(0, len(ids), FLUSH_ROWS):
                part = {request_id: by[request_id] for request_id in ids[start : start + FLUSH_ROWS]}
                written += await self._database.write(partial(_write, noted=part, now=now))
        return written


def _write(session: Session, noted: Mapping[str, Principal], now: datetime | None) -> int:
    """Write these, in the order of rows, skipping rows that another server has locked, so that no two servers wait for
    each other."""
    row = Operation
    # Looked up by id alone: otherwise SQLite would scan all operations of the organisation.
    fresh = select(row).options(load_only(row.org_id, row.key_id, row.user_id))
    fresh = fresh.where(row.id.in_(noted), row.state != "queued", row.fetched_at.is_(None))
    found = session.scalars(fresh.order_by(row.id).with_for_update(skip_locked=True))
    ids = [op.id for op in found if op.org_id == (who := noted[op.id]).org_id and is_own(who, op)]
    if ids:
        session.execute(update(row).where(row.id.in_(ids)).values(fetched_at=now or clock(session)))
    return len(ids)
