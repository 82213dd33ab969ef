"""How long results are kept: each for a while, up to a number of bytes for each organisation. Called by a job
(`scheduler.jobs.housekeeping`).

A result that its client has fetched is deleted soon after; one that nobody asked for is kept for a day. Beyond the
limit of an organisation those that were fetched go first, then the oldest. `operations.result_bytes` is set while a
result is kept: the blob is deleted before the row says so, so a sweep that dies leaves nothing behind that the next one
would miss. An operation without its blob is `Gone` when it is asked for again (`scheduler.journal.ending.outcomes`).

Most rows of the journal are samples, and nothing is built on them: long after they have ended their rows are deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial

from sqlalchemy import delete, func, or_, select, update
from sqlalchemy.orm import Session

from billing.metering.quotas import Claim, limit_of
from store import tables
from store.blobs.contract import Blobs
from store.database.db import Database

log = logging.getLogger(__name__)

#: Results are kept for a day after they were written.
RESULTS_LAST = timedelta(hours=24)
#: A client may have lost a result on the way, and may ask for it again within this time.
FETCHED_LAST = timedelta(minutes=10)
#: How many results, or rows, are deleted between two writes.
BATCH = 500
#: How many rows one query finds.
LOOK = 100 * BATCH

_OP = tables.Operation
_KEPT = _OP.result_bytes.is_not(None)

#: An operation's id, and the blob of its result; None if the result lies in the row.
_Result = tuple[str, str | None]


class Results:
    """`sweep` runs in a thread; `limit_bytes` holds for each organisation without a quota of its own."""

    def __init__(
        self,
        database: Database,
        blobs: Blobs,
        limit_bytes: int,
        clock: Callable[[], datetime],
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._limit_bytes = limit_bytes
        self._clock = clock

    def sweep(self) -> int:
        """Delete expired results, then those beyond the limits. Returns how many."""
        now = self._clock()
        with self._database.read() as session:
            over = _over(session, now)
        deleted = self._delete(over)
        with self._database.read() as session:
            excess = [result for crowd in self._crowded(session) for result in self._excess(session, *crowd)]
        return deleted + self._delete(excess)

    def _crowded(self, session: Session) -> list[tuple[str, int, int]]:
        """Organisations beyond their limit; by how much, and the limit, in bytes."""
        kept = select(_OP.org_id, func.sum(_OP.result_bytes)).where(_KEPT).group_by(_OP.org_id)
        sizes = [(org_id, int(size or 0)) for org_id, size in session.execute(kept)]
        default = Claim("result_bytes", self._limit_bytes)
        limits = {org_id: limit_of(session, org_id, default) for org_id, _ in sizes}
        return [(org_id, size, limits[org_id]) for org_id, size in sizes if size > limits[org_id]]

    def _excess(self, session: Session, org_id: str, kept_bytes: int, limit_bytes: int) -> list[_Result]:
        """The results of an organisation to delete: fetched ones first, each group from the oldest on."""
        unfetched = _OP.fetched_at.is_(None)
        query = select(_OP.id, _OP.result_ref, _OP.result_bytes).where(_KEPT, _OP.org_id == org_id)
        found: list[_Result] = []
        for op_id, ref, size in session.execute(query.order_by(unfetched, _OP.fetched_at, _OP.finished_at, _OP.id)):
            if kept_bytes <= limit_bytes:
                break
            found.append((op_id, ref))
            kept_bytes -= size or 0
        return found

    def _delete(self, results: Sequence[_Result]) -> int:
        deleted = 0
        for start in range(0, len(results), BATCH):
            chosen = results[start : start + BATCH]
            gone = [op_id for op_id, ref in chosen if ref is None or self._delete_blob(op_id, ref)]
            if gone:
                self._database.write_now(partial(_forget, gone))
            deleted += len(gone)
        return deleted

    def _delete_blob(self, op_id: str, ref: str) -> bool:
        """Delete a blob. False if that failed: the result still counts, and the next sweep tries again."""
        try:
            self._blobs.delete(ref)
        except OSError:
            log.exception("the result of operation %s cannot be deleted", op_id)
            return False
        return True


def _forget(op_ids: list[str], session: Session) -> None:
    session.execute(update(_OP).where(_OP.id.in_(sorted(op_ids))).values(result_bytes=None, result=None))


def _over(session: Session, now: datetime) -> list[_Result]:
    """The condition for results that have been kept long enough."""
    old = or_(_OP.fetched_at <= now - FETCHED_LAST, _OP.finished_at <= now - RESULTS_LAST)
    return [(op_id, ref) for op_id, ref in session.execute(select(_OP.id, _OP.result_ref).where(_KEPT, old))]


def forget_samples(database: Database, before: datetime) -> int:
    """Delete the rows of samples that ended before then and whose results are gone. Returns how many."""
    ended = select(_OP.id).where(_OP.finished_at < before, tables.SAMPLES, _OP.result_bytes.is_(None))
    forgotten = 0
    while True:
        with database.read() as session:
            found = session.scalars(ended.order_by(_OP.finished_at).limit(LOOK)).all()
        for start in range(0, len(found), BATCH):
            database.write_now(partial(_forget_rows, found[start : start + BATCH]))
        forgotten += len(found)
        if len(found) < LOOK:
            return forgotten


def _forget_rows(op_ids: Sequence[str], session: Session) -> None:
    session.execute(delete(_OP).where(_OP.id.in_(sorted(op_ids))))
