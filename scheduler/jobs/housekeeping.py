"""Checkpoints, results and samples whose time is over, files that nothing needs, and a sign of life."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from scheduler.jobs.reaper import Reaper
from scheduler.jobs.registry import JobContext, Result, job
from scheduler.journal.ending import results

#: One per data folder and process: it remembers what the last round found unneeded.
_REAPERS: dict[Path, Reaper] = {}


def _reaper(context: JobContext) -> Reaper:
    root = context.blobs.root
    if root not in _REAPERS:
        _REAPERS[root] = Reaper(context.database, context.blobs, context.now)
    return _REAPERS[root]


@job("heartbeat", every_s=30)
def heartbeat(context: JobContext) -> Result:
    """Nothing but its own row in job_runs: while that is young, driver, carrier and database all work."""
    return {}


@job("expire_checkpoints", every_s=20)
def expire_checkpoints(context: JobContext) -> Result:
    return {"expired": _reaper(context).expire()}


@job("sweep_results", every_s=60)
def sweep_results(context: JobContext) -> Result:
    limit_bytes = context.settings.limits.result_bytes_per_org
    return {"deleted": results.Results(context.database, context.blobs, limit_bytes, context.now).sweep()}


@job("forget_samples", every_s=3600)
def forget_samples(context: JobContext) -> Result:
    """An hour late: reports that look back as far begin with a whole one."""
    before = context.now() - timedelta(days=context.settings.limits.sample_days, hours=1)
    return {"deleted": results.forget_samples(context.database, before)}


@job("sweep_files", every_s=600)
def sweep_files(context: JobContext) -> Result:
    return {"deleted": len(_reaper(context).sweep())}
