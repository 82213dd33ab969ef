"""`weftd jobs`: what the server does on its own (docs/jobs.md)."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import click

from api.commands.places import Place, database_of, refuse, say_as, settings_of, where
from store.settings import Settings, SettingsError

if TYPE_CHECKING:
    from scheduler.jobs.registry import JobContext


@click.group()
def jobs() -> None:
    """Periodic work of the server: billing, webhooks, expiry."""


@jobs.command("list")
@where
@click.option("--check", is_flag=True, help="Exit code 1 if a job is overdue: for probes and alarms.")
def list_(place: Place, check: bool) -> None:
    """Show each job: how often it runs, when it last succeeded, what it did, and what is wrong."""
    from scheduler.jobs.catalogue import JOBS
    from scheduler.jobs.running import states

    now = datetime.now(UTC)
    with database_of(place) as database, database.read() as session:
        found = states(session, JOBS, now)
    for state in found:
        row, age_s = state.row, state.age_s(now)
        last = f"{row.succeeded_at:%Y-%m-%dT%H:%M:%SZ}" if row and row.succeeded_at else "never"
        age = f"{age_s:.0f}s" if age_s is not None else "-"
        late = "waits" if state.waits else "overdue" if state.overdue(now) else "ok"
        condition = "running" if state.running else late
        what = (row.error or json.dumps(row.result or {})) if row else "{}"
        click.echo(f"{state.job.name}\tevery {state.job.every_s:.0f}s\t{last}\t{age}\t{condition}\t{what}")
    if check and any(state.overdue(now) for state in found):
        sys.exit(1)


@jobs.command()
@where
@click.argument("name")
def run(place: Place, name: str) -> None:
    """Run the job NAME now, whether or not it is due. Prints what it did, as JSON."""
    from scheduler.jobs.catalogue import JOBS
    from scheduler.jobs.running import run_now

    if name not in JOBS:
        refuse(f"no job {name!r}: there are {', '.join(sorted(JOBS))}")
    context = _context(_migrated(place))
    try:
        result = run_now(context, JOBS[name])
    except Exception as error:
        refuse(f"{name} failed: {type(error).__name__}: {error}", 1)
    finally:
        context.database.close()
    if result is None:
        refuse(f"{name} is running elsewhere", 1)
    click.echo(json.dumps(result))


@jobs.command()
@where
@click.option("--concurrency", type=click.IntRange(1, 64), default=2, show_default=True, help="Jobs at a time.")
def worker(place: Place, concurrency: int) -> None:
    """Run jobs that Redis hands out (jobs.driver = "celery"), until SIGTERM."""
    settings = _migrated(place)
    with ProcessPoolExecutor(1, get_context("spawn")) as aside:
        problem = aside.submit(_problem, settings).result()
    if problem is not None:
        refuse(problem)
    needs_no_others = ["--without-gossip", "--without-mingle"]
    _celery(settings).worker_main(["worker", "--loglevel=INFO", f"--concurrency={concurrency}", *needs_no_others])


@jobs.command()
@where
def beat(place: Place) -> None:
    """Have workers look for due jobs every few seconds. One such process is enough; several do no harm."""
    _celery(_migrated(place)).Beat(loglevel="INFO", quiet=True).run()


def _celery(settings: Settings) -> Any:
    from scheduler.jobs.production import celery_app

    try:
        return celery_app(settings)
    except SettingsError as error:
        refuse(error)


def _problem(settings: Settings) -> SettingsError | OSError | None:
    """Why jobs cannot run here. Checked in a process of its own: the object store's client has threads, and a process
    forked from one that has used it would wait for them for ever; Celery's workers are forks."""
    from scheduler.jobs.context import open_context

    try:
        open_context(settings).database.close()
    except (SettingsError, OSError) as error:
        return error
    return None


def _context(settings: Settings) -> JobContext:
    from scheduler.jobs.context import open_context

    try:
        return open_context(settings)
    except (SettingsError, OSError) as error:
        refuse(error)


def _migrated(place: Place) -> Settings:
    """The settings, with the tables of their database up to date."""
    settings = settings_of(place)
    say_as(settings, "jobs")
    with database_of(place):
        return settings
