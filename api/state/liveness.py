"""Which sessions are alive: when each was last heard of, and how they end.

Every client reports every ten seconds, and its requests count as well: a sampler that was handed to another process
sends no reports of its own. The times are kept in memory and written now and then by `flush`; a crash loses only what
was not written, and a session is ended only after long silence. Ending is decided in the database, where the first one
wins, and by the database's time, since the clocks of servers may differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from typing import cast

from sqlalchemy import Table, bindparam, select, update
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from api.errors import SessionEnded
from api.who.lookup import session_by_id
from api.who.principal import Principal
from billing.metering import storage
from store import tables
from store.database import audit
from store.database.clock import clock
from store.database.db import Database

#: How many sessions one write notes, so that other writers need not wait long.
FLUSH_ROWS = 500

_SESSION = cast("Table", tables.Session.__table__)
#: Built once: it runs for each session every few seconds.
_SEEN_NOW = (
    update(_SESSION)
    .where(_SESSION.c.id == bindparam("session"), _SESSION.c.state == "active")
    .values(last_seen_at=bindparam("at"))
    .returning(_SESSION.c.id)
)


@dataclass
class _Seen:
    domain: str
    at: datetime
    written: bool = False


class Liveness:
    """The sessions that were heard of since the last flush. Lives in the event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._seen: dict[str, _Seen] = {}

    async def beat(self, who: Principal, session_id: str) -> None:
        """A client's report. Raises NotFound, and SessionEnded once the session is over."""
        seen = self._seen.get(session_id)
        if seen is None or seen.domain != who.domain:
            await run_in_threadpool(self._check, who, session_id)
        self._seen[session_id] = _Seen(who.domain, datetime.now(UTC))

    def asked(self, who: Principal, session_id: str) -> None:
        """`who`, whose right to do so was checked, has used this session."""
        self._seen[session_id] = _Seen(who.domain, datetime.now(UTC))

    def _check(self, who: Principal, session_id: str) -> None:
        with self._database.read() as session:
            row = session_by_id(session, who, session_id)
        if row.state != "active":
            raise SessionEnded(f"session {row.id} has ended ({row.state}): create a new one")

    def ended(self, session_ids: Iterable[str]) -> None:
        for session_id in session_ids:
            self._seen.pop(session_id, None)

    async def flush(self) -> None:
        """Write what is new. Sessions that have ended, or that nothing was heard of since the last flush, are
        forgotten: their next sign of life is looked up again."""
        self.ended([session_id for session_id, seen in self._seen.items() if seen.written])
        # In a fixed order: two servers may both hear of a session, and must never wait for each other.
        fresh, now = sorted(self._seen.items(), key=itemgetter(0)), datetime.now(UTC)
        for start in range(0, len(fresh), FLUSH_ROWS):
            part = [(session_id, seen, now - seen.at) for session_id, seen in fresh[start : start + FLUSH_ROWS]]

            def write(session: Session, part: list[tuple[str, _Seen, timedelta]] = part) -> list[str]:
                there = clock(session)
                return [session_id for session_id, _, ago in part if not _touch(session, session_id, there - ago)]

            self.ended(await self._database.write(write))
            for _, seen, _ in part:
                seen.written = True


def _touch(session: Session, session_id: str, at: datetime) -> bool:
    """Set when the session was last heard of. False if it has ended."""
    return session.scalar(_SEEN_NOW, {"session": session_id, "at": at}) is not None


def end(
    session: Session, row: tables.Session, state: str, *, reason: str | None, detail: str | None, key_id: int | None
) -> bool:
    """Within a write: end a session. False, and nothing changes, if it had ended before: the first reason stands."""
    session.refresh(row, with_for_update=True)  # another server may be ending it, too
    if row.state != "active":
        return False
    row.state, row.finish_reason, row.finish_detail, row.ended_at = state, reason, detail, datetime.now(UTC)
    storage.end_session(session, row.id, row.ended_at)
    why = {"reason": reason} if reason else {}
    audit.record(
        session, org_id=row.org_id, key_id=key_id, event=f"session_{state}", target=row.id, detail=why, at=row.ended_at
    )
    return True


def runs_of(session: Session, session_id: str) -> list[str]:
    """The runs that end with this session."""
    return list(session.scalars(select(tables.Run.id).filter_by(session_id=session_id, state="live")))


def end_idle(session: Session, before: datetime, working: set[str]) -> list[str]:
    """Within a write: expire the sessions that were last heard of before `before`, except those that are still
    `working`. Returns their ids."""
    query = select(tables.Session).where(tables.Session.state == "active", tables.Session.last_seen_at < before)
    unused = session.scalars(query.with_for_update(skip_locked=True))  # skip those that another server is updating
    idle = [row for row in unused if row.id not in working][:FLUSH_ROWS]
    for row in idle:
        end(session, row, "expired", reason=None, detail=None, key_id=None)
    return [row.id for row in idle]
