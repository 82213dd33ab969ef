"""Checkpoints, results and samples whose time is over, files that nothing needs, and a sign of life that says what time
it is."""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

from sqlalchemy.orm import Session

from billing.money.alerts import raise_alert, resolve_alert
from scheduler.jobs.reaper import Reaper
from scheduler.jobs.registry import JobContext, Result, job
from scheduler.journal.ending import results
from store.database import leaps
from store.tables import JobRun

#: One reaper for each data folder and process: it remembers which folders the last round found unneeded.
_REAPERS: dict[Path, Reaper] = {}


def _reaper(context: JobContext) -> Reaper:
    root = context.blobs.root
    if root not in _REAPERS:
        _REAPERS[root] = Reaper(context.database, context.blobs, context.now)
    _REAPERS[root].clock = context.now
    return _REAPERS[root]


@job(leaps.HEARTBEAT, every_s=30)
def heartbeat(context: JobContext) -> Result:
    """Update its own row in job_runs: while that is recent, driver, carrier and database all work. It also notes the
    time, which jobs that cannot be undone are checked against."""
    now = context.now()
    with context.database.read() as session:
        before = leaps.noted_in(session.get(JobRun, leaps.HEARTBEAT))
    noted = context.watch.look(before, now)
    if before is not None and noted.leapt_at != before.leapt_at:
        context.database.write_now(partial(_tell, before=before, noted=noted))
    return noted.row()


def _tell(session: Session, before: leaps.Noted, noted: leaps.Noted) -> None:
    """Log a leap of the clock, and later that it is over."""
    if before.leapt_at is not None:
        resolve_alert(session, kind="clock_leapt", ref=_ref(before.leapt_at), now=noted.at)
    if noted.leapt_at is not None:
        until = noted.leapt_at + leaps.SETTLES
        message = (
            f"it is {noted.at:%Y-%m-%d %H:%M} UTC, and was {before.at:%Y-%m-%d %H:%M} when a job last looked: the "
            f"clock leapt, or no job ran. Nothing expires or is closed before {until:%Y-%m-%d %H:%M}; if the time "
            "is wrong, put it right until then"
        )
        raise_alert(session, kind="clock_leapt", ref=_ref(noted.leapt_at), message=message, now=noted.at)


def _ref(leapt_at: datetime) -> str:
    return f"{leapt_at:%Y-%m-%dT%H:%M:%S}"


@job("expire_checkpoints", every_s=20, final=True)
def expire_checkpoints(context: JobContext) -> Result:
    return {"expired": _reaper(context).expire()}


@job("sweep_results", every_s=60, final=True)
def sweep_results(context: JobContext) -> Result:
    limit_bytes = context.settings.limits.result_bytes_per_org
    return {"deleted": results.Results(context.database, context.blobs, limit_bytes, context.now).sweep()}


@job("forget_samples", every_s=3600, final=True)
def forget_samples(context: JobContext) -> Result:
    """An hour later than a report's window, so that a report begins with a whole hour."""
    before = context.now() - timedelta(days=context.settings.limits.sample_days, hours=1)
    return {"deleted": results.forget_samples(context.database, before)}


@job("sweep_files", every_s=600, final=True)
def sweep_files(context: JobContext) -> Result:
    return {"deleted": len(_reaper(context).sweep())}
