"""When a job is due, that only one process runs it at a time, and what is written down about it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import make_url, text, update

from billing.prices import load_prices
from scheduler.jobs.embedded import EmbeddedJobs
from scheduler.jobs.registry import Job, JobContext, Result
from scheduler.jobs.running import LEASE_S, RESTS_TIMES, RETRY_S, _start, ask, run_if_due, run_now, states
from store.blobs.folder import FolderBlobs
from store.database.db import Database
from store.settings import Settings
from store.tables import JobRun

START = datetime(2026, 11, 29, 12, tzinfo=UTC)


class Shop:
    """One job that counts its runs, and a clock."""

    def __init__(self, database: Database, folder: Path) -> None:
        self.now = START
        self.runs = 0
        self.fails = False
        self.job = Job("count", 60, self._run)
        settings = Settings(data_dir=folder)
        self.context = JobContext(database, FolderBlobs(folder / "blobs"), settings, load_prices(), lambda: self.now)

    def _run(self, context: JobContext) -> Result:
        self.runs += 1
        if self.fails:
            raise RuntimeError("no luck")
        return {"runs": self.runs}

    def wait(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def due(self) -> bool:
        with self.context.database.read() as session:
            (state,) = states(session, {"count": self.job}, self.now)
        return state.due(self.now)

    def row(self) -> JobRun:
        with self.context.database.read() as session:
            return session.get_one(JobRun, "count")


@pytest.fixture
def shop(any_database: Database, tmp_path: Path) -> Shop:
    return Shop(any_database, tmp_path)


def test_a_job_is_due_at_first_and_then_after_its_time(shop: Shop) -> None:
    assert run_if_due(shop.context, shop.job) == {"runs": 1}
    shop.wait(59)
    assert run_if_due(shop.context, shop.job) is None
    shop.wait(1)
    assert run_if_due(shop.context, shop.job) == {"runs": 2}
    row = shop.row()
    assert (row.started_at, row.succeeded_at, row.result, row.error) == (shop.now, shop.now, {"runs": 2}, None)


def test_a_clock_that_is_set_back_delays_a_job_by_no_more_than_its_time(shop: Shop) -> None:
    run_if_due(shop.context, shop.job)
    shop.wait(-30)  # clocks of machines that take turns may differ
    assert not shop.due()
    shop.wait(-3600)
    assert shop.due()
    assert run_if_due(shop.context, shop.job) == {"runs": 2}
    assert not shop.due()


def test_a_lease_from_a_clock_that_was_ahead_holds_up_nobody(shop: Shop) -> None:
    """Left by a process that died on a machine with a wrong clock: nobody would do the job for years."""
    ahead = START + timedelta(days=3650)
    assert shop.context.database.write_now(lambda session: _start(session, shop.job, "dead", ahead, True))
    assert shop.due()
    assert run_if_due(shop.context, shop.job) == {"runs": 1}


def test_asked_for_it_is_due_at_once_and_once(shop: Shop) -> None:
    run_if_due(shop.context, shop.job)
    assert not shop.due()
    shop.context.database.write_now(lambda session: ask(session, "count", shop.now))
    assert run_if_due(shop.context, shop.job) == {"runs": 2}
    assert not shop.due()


def test_asking_while_it_runs_is_not_lost(shop: Shop) -> None:
    def run(context: JobContext) -> Result:
        context.database.write_now(lambda session: ask(session, "count", shop.now))
        return {}

    run_if_due(shop.context, Job("count", 60, run))
    assert shop.due()


def test_a_failure_is_written_down_and_tried_again_sooner(shop: Shop) -> None:
    shop.job = Job("count", 86_400, shop._run)
    shop.fails = True
    assert run_if_due(shop.context, shop.job) is None
    assert (shop.row().error, shop.row().succeeded_at) == ("RuntimeError: no luck", None)
    assert not shop.due()
    shop.wait(RETRY_S)
    shop.fails = False
    assert run_if_due(shop.context, shop.job) == {"runs": 2}
    assert shop.row().error is None
    shop.wait(RETRY_S)
    assert not shop.due()


def test_a_long_job_that_fails_is_not_tried_again_at_once(shop: Shop) -> None:
    """One customer deleted at Stripe makes a whole comparison fail, for two months: it would ask Stripe for all others
    every minute, while a single server's other jobs wait."""
    shop.job = Job("count", 86_400, shop._run)
    shop.fails = True
    run_if_due(shop.context, shop.job)
    took = update(JobRun).values(duration_ms=120_000)
    shop.context.database.write_now(lambda session: session.execute(took) and None)
    shop.wait(RETRY_S)
    assert not shop.due()
    shop.wait(RESTS_TIMES * 120 - RETRY_S)
    assert shop.due()


def test_a_process_that_died_is_followed_by_another_when_its_lease_is_over(shop: Shop) -> None:
    # kill -9 leaves behind the lease and the start, nothing else
    shop.context.database.write_now(lambda session: _start(session, shop.job, "dead", shop.now, False))
    shop.wait(LEASE_S - 1)
    assert not shop.due()
    assert run_now(shop.context, shop.job) is None
    shop.wait(1)
    assert run_if_due(shop.context, shop.job) == {"runs": 1}


def test_the_time_of_jobs_is_the_databases(postgres_database: Database, tmp_path: Path) -> None:
    """A machine whose clock is a day ahead would expire checkpoints, close months and bill storage too early, and run
    what another machine is running. Here the database's clock is a day behind."""
    clock = "CREATE FUNCTION public.clock_timestamp() RETURNS timestamptz RETURN now() - interval '1 day'"
    postgres_database.write_now(lambda session: session.execute(text(clock)))
    url = make_url(postgres_database.url).update_query_dict({"options": "-csearch_path=public,pg_catalog"})
    database = Database(url.render_as_string(hide_password=False))
    context = JobContext(database, FolderBlobs(tmp_path / "blobs"), Settings(data_dir=tmp_path), load_prices())
    job = Job("count", 60, lambda context: {"ran": 1})
    theirs = datetime.now(UTC) - timedelta(days=1)
    assert abs(context.now() - theirs) < timedelta(hours=1)
    database.write_now(lambda session: _start(session, job, "another", theirs, False))
    assert run_now(context, job) is None
    database.close()


def test_only_one_of_many_runs_it(shop: Shop) -> None:
    inside, go = threading.Semaphore(0), threading.Event()

    def run(context: JobContext) -> Result:
        inside.release()
        go.wait(30)
        return {"ran": 1}

    job = Job("count", 60, run)
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(run_if_due, shop.context, job) for _ in range(4)]
        inside.acquire()
        while sum(future.done() for future in futures) < 3:
            go.wait(0.01)
        go.set()
        results = [future.result(30) for future in futures]
    assert sorted(results, key=str) == [None, None, None, {"ran": 1}]


def test_the_embedded_driver_runs_what_is_due_until_it_is_stopped(shop: Shop) -> None:
    ran = threading.Event()

    def run(context: JobContext) -> Result:
        ran.set()
        return {}

    def fail(context: JobContext) -> Result:
        raise RuntimeError("no luck")

    driver = EmbeddedJobs(shop.context, {"bad": Job("bad", 60, fail), "good": Job("good", 60, run)})
    driver.start()
    assert ran.wait(30)
    driver.stop()
    with shop.context.database.read() as session:
        assert session.get_one(JobRun, "bad").error == "RuntimeError: no luck"
        assert session.get_one(JobRun, "good").succeeded_at is not None
