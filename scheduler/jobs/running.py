"""Decides which jobs are due and runs one, under its lease, and records the result.

Both drivers go through here, so that what is due is decided by the database alone. A lease keeps two processes from
doing the same work at once; that is thrift, not safety: jobs are safe to run twice.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from sqlalchemy import delete, not_, select
from sqlalchemy.orm import Session

from scheduler.jobs.registry import Job, JobContext, Result
from store.database import leaps
from store.database.bulk import insert_into
from store.tables import JobLease, JobRun

log = logging.getLogger(__name__)

#: A job that has not ended by then may be started again: its process is taken for dead.
LEASE_S = 600.0
#: Pause after a failed job: this long, and a multiple of the time that the job took; or the job's own interval, if that
#: is shorter.
RETRY_S = 60.0
RESTS_TIMES = 10


@dataclass(frozen=True)
class JobState:
    """A job as an operator sees it. `waits`: it does not run until the time is believed again."""

    job: Job
    row: JobRun | None
    running: bool
    waits: bool = False

    def due(self, now: datetime) -> bool:
        if self.running or self.waits:
            return False
        if self.row is None or self.row.started_at is None or self.row.asked_at is not None:
            return True
        ended_well = self.row.succeeded_at is not None and self.row.succeeded_at >= self.row.started_at
        failed = self.row.failed_at is not None and self.row.failed_at >= self.row.started_at
        rest_s = max(RETRY_S, RESTS_TIMES * (self.row.duration_ms or 0) / 1000) if failed else RETRY_S
        wait_s = self.job.every_s if ended_well else min(self.job.every_s, rest_s)
        # abs(): if the clock was set back since, it started in the future
        return abs(now - self.row.started_at) >= timedelta(seconds=wait_s)

    def age_s(self, now: datetime) -> float | None:
        """Seconds since the job last succeeded; None if it never has."""
        return (now - self.row.succeeded_at).total_seconds() if self.row and self.row.succeeded_at else None

    def overdue(self, now: datetime) -> bool:
        """True if the job has not succeeded for longer than twice its interval and the time of a lease."""
        age_s = self.age_s(now)
        return not self.waits and (age_s is None or age_s > 2 * self.job.every_s + LEASE_S)


def states(session: Session, jobs: Mapping[str, Job], now: datetime) -> list[JobState]:
    rows = {row.name: row for row in session.scalars(select(JobRun))}
    running = set(session.scalars(select(JobLease.name).where(not_(JobLease.over(now, LEASE_S)))))
    leapt = leaps.settles_by(rows.get(leaps.HEARTBEAT), now) is not None
    return [JobState(job, rows.get(name), name in running, job.final and leapt) for name, job in sorted(jobs.items())]


def ask(session: Session, name: str, now: datetime) -> None:
    """Make a job due at once. Call it in the transaction that writes the job's work, so that neither is lost without
    the other."""
    row = insert_into(session, JobRun).values(name=name, asked_at=now)
    session.execute(row.on_conflict_do_update(index_elements=["name"], set_={"asked_at": now}))


def run_if_due(context: JobContext, job: Job) -> Result | None:
    """Run a job if it is due and nobody runs it. None if not; a job's own error is logged and written down."""
    try:
        return _run(context, job, forced=False)
    except Exception:
        log.exception("job %s failed; it is tried again", job.name)
        return None


def run_now(context: JobContext, job: Job) -> Result | None:
    """Run a job whether or not it is due, and raise what it raises. None: another process is running it. Raises
    TimeNotBelieved for one that cannot be undone."""
    return _run(context, job, forced=True)


class TimeNotBelieved(RuntimeError):
    """The clock has leapt, so a job that cannot be undone does not run."""


def _run(context: JobContext, job: Job, *, forced: bool) -> Result | None:
    holder = uuid.uuid4().hex
    started_at, began = context.now(), time.monotonic()
    if not context.database.write_now(lambda session: _start(session, job, holder, started_at, forced)):
        return None
    result: Result | None = None
    error: str | None = None
    try:
        # From a clock that does not leap.
        steady = replace(context, clock=lambda: started_at + timedelta(seconds=time.monotonic() - began))
        result = job.run(steady if job.final else context)
        return result
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"[:1024]
        raise
    finally:
        duration_ms = round((time.monotonic() - began) * 1000)
        ended_at = max(context.now(), started_at)
        context.database.write_now(lambda session: _end(session, job, holder, ended_at, duration_ms, result, error))


def _start(session: Session, job: Job, holder: str, now: datetime, forced: bool) -> bool:
    if job.final and (until := leaps.settles_at(session, now)) is not None:
        if not forced:
            return False
        raise TimeNotBelieved(
            f"what it does cannot be undone, and the time, {now:%Y-%m-%d %H:%M} UTC, is not believed yet: the clock "
            f"leapt, or no job ran for long. See that it is right, and wait until {until:%Y-%m-%d %H:%M} UTC"
        )
    lease = insert_into(session, JobLease).values(name=job.name, holder=holder, until=now + timedelta(seconds=LEASE_S))
    lease = lease.on_conflict_do_update(
        index_elements=["name"],
        set_={"holder": lease.excluded.holder, "until": lease.excluded.until},
        where=JobLease.over(now, LEASE_S),
    )
    if session.scalar(lease.returning(JobLease.name)) is None:
        return False
    row = session.get(JobRun, job.name, with_for_update=True)
    if not forced and not JobState(job, row, running=False).due(now):
        session.execute(delete(JobLease).where(JobLease.name == job.name))
        return False
    started = {"started_at": now, "asked_at": None}
    insert = insert_into(session, JobRun).values(name=job.name, **started)
    session.execute(insert.on_conflict_do_update(index_elements=["name"], set_=started))
    return True


def _end(
    session: Session, job: Job, holder: str, now: datetime, duration_ms: int, result: Result | None, error: str | None
) -> None:
    session.execute(delete(JobLease).where(JobLease.name == job.name, JobLease.holder == holder))
    row = session.get_one(JobRun, job.name, with_for_update=True)
    row.duration_ms, row.error = duration_ms, error
    if error is None:
        row.succeeded_at, row.result = now, dict(result or {})
    else:
        row.failed_at = now
