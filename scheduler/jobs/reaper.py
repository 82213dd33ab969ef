"""Takes away what has expired and what nothing needs any more. Called by jobs (`scheduler.jobs.housekeeping`).

Rows first, files after: a checkpoint that has expired is gone for everybody before its folder is. A folder is deleted
only when two rounds in a row found it unneeded, so that a worker that was just told of it has read it by then. Folders
are listed before the database is asked, so what is made meanwhile is never judged by an older answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from functools import partial

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from billing.metering import storage
from scheduler.journal.ending.references import all_in_use
from scheduler.journal.ending.results import RESULTS_LAST
from store import tables
from store.blobs.contract import Blobs
from store.database import audit
from store.database.db import Database

#: How long logprobs recorded for stable_reinforce are kept after they were last trained on. Custom losses are kept that
#: long after they were made, and longer if their session is still active.
RECORDINGS_LAST = timedelta(hours=24)
#: How long turns sampled under a client's own session id are kept.
TURNS_LAST = timedelta(hours=24)
#: Archives are kept longer than the links to them, which are good for an hour.
ARCHIVES_LAST = timedelta(hours=2)
#: No write of one blob takes longer than this.
WRITING_LASTS = timedelta(hours=24)
#: How many ids one query asks for.
BATCH = 500


class Reaper:
    """Deletes what has expired and what nothing needs. Runs in a thread, since `sweep` may take long; one call of each
    method at a time."""

    def __init__(self, database: Database, blobs: Blobs, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._blobs = blobs
        self.clock = clock  # set by the job that runs
        self._unneeded: set[str] = set()

    def expire(self) -> int:
        """Delete expired checkpoints, some at a time, and rows of old turns. Returns the number of checkpoints."""
        now, expired = self.clock(), 0
        self._database.write_now(partial(_forget_turns, before=now - TURNS_LAST))
        while some := self._database.write_now(partial(_expire, now=now)):
            expired += some
        return expired

    def sweep(self) -> list[str]:
        """Delete the files that nothing needs. Returns what was deleted.

        Most results are deleted by `scheduler.journal.ending.results`; here only those go that no row names.
        """
        weights = set(self._blobs.listed("weights/*"))
        snapshots = {ref: _name(ref) for ref in self._blobs.listed("runs/*")}
        bodies = {_name(ref): ref for ref in self._old("ops/*/*", RESULTS_LAST)}
        losses = {_name(ref): ref for ref in self._old("losses/*", RECORDINGS_LAST)}
        with self._database.read() as session:
            live = _live(session)
            unneeded = weights - all_in_use(session)
            unneeded |= {ref for ref, run_id in snapshots.items() if run_id not in live}
            needed = _needed_bodies(session, bodies)
            sessions = {run_id.partition(":")[0] for run_id in live} | _active(session)
        gone = sorted(unneeded & self._unneeded)
        self._unneeded = unneeded - set(gone)
        archives, recordings = self._old("archives/*", ARCHIVES_LAST), self._old("stability/*/*", RECORDINGS_LAST)
        used = dict.fromkeys(archives, ARCHIVES_LAST) | dict.fromkeys(recordings, RECORDINGS_LAST)
        files = [ref for name, ref in bodies.items() if name not in needed]
        files += [ref for name, ref in losses.items() if name.partition(":")[0] not in sessions]
        files += self._old("turns/*/*", TURNS_LAST) + self._old("results/*/*", RESULTS_LAST)
        files += [*recordings, *self._old("handoff/*", RECORDINGS_LAST)]
        deleted = self._delete([*gone, *archives], self._blobs.delete_tree, used)
        deleted += self._delete(files, self._blobs.delete, used)
        self._blobs.clear_unfinished((self.clock() - WRITING_LASTS).timestamp())
        return deleted

    def _delete(self, refs: Iterable[str], delete: Callable[[str], None], used: Mapping[str, timedelta]) -> list[str]:
        """Delete these. For files with a last use the age is checked again just before: deleting the earlier ones may
        have taken minutes."""
        deleted = []
        for ref in refs:
            if ref not in used or self._old(ref, used[ref]):
                delete(ref)
                deleted.append(ref)
        return deleted

    def _old(self, pattern: str, age: timedelta) -> list[str]:
        """Blobs of this pattern that were last written more than `age` ago."""
        before = (self.clock() - age).timestamp()
        return sorted(ref for ref, written in self._blobs.listed(pattern).items() if written < before)


def _forget_turns(session: Session, before: datetime) -> None:
    session.execute(delete(tables.SessionTurn).where(tables.SessionTurn.created_at < before))


def _expire(session: Session, now: datetime) -> int:
    rows = storage.expired(session, now)
    storage.end(session, rows, now)
    for row in rows:
        path = f"tinker://{row.run_id}/{row.kind}/{row.name}"
        audit.record(session, org_id=row.org_id, key_id=None, event="checkpoint_expired", target=path, at=now)
        session.delete(row)
    return len(rows)


def _name(ref: str) -> str:
    return ref.rpartition("/")[2]


def _live(session: Session) -> set[str]:
    return set(session.scalars(select(tables.Run.id).where(tables.Run.state == "live")))


def _active(session: Session) -> set[str]:
    return set(session.scalars(select(tables.Session.id).where(tables.Session.state == "active")))


def _needed_bodies(session: Session, op_ids: Iterable[str]) -> set[str]:
    """Bodies of operations that are still to run, or that a live run would be rebuilt from."""
    ids, needed = list(op_ids), set()
    row = tables.Operation
    for start in range(0, len(ids), BATCH):
        chosen = row.id.in_(ids[start : start + BATCH])
        needed |= set(session.scalars(select(row.id).where(chosen, row.state == "queued")))
        lanes = select(row.id).join(tables.Run, tables.Run.id == row.lane)
        needed |= set(session.scalars(lanes.where(chosen, tables.Run.state == "live")))
    return needed
