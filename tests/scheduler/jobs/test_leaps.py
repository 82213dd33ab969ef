"""Nothing that cannot be undone is done within an hour of a leap of the clock; afterwards all of it is."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy.orm import Session

from billing.money import grants
from billing.money.accounts import OutOfMoney, Payer, check_left
from billing.money.alerts import read_gauges
from billing.money.wallets import set_mode
from billing.prices import load_prices
from scheduler.jobs.catalogue import JOBS
from scheduler.jobs.registry import Job, JobContext, Result
from scheduler.jobs.running import TimeNotBelieved, run_if_due, run_now, states
from store import tables
from store.blobs.folder import FolderBlobs
from store.database.caller import Caller, acting_as
from store.database.db import Database
from store.database.leaps import Watch
from store.people.organisations import organisation_named
from store.settings import Settings

START = datetime(2026, 11, 29, 12, tzinfo=UTC)
YEARS, HOUR = timedelta(days=3650), timedelta(hours=1)


class Clocks:
    """A process, the time that its clock shows and the time that has really passed; one job that counts its runs."""

    def __init__(self, database: Database, folder: Path) -> None:
        self.database, self.folder = database, folder
        self.now, self.passed_s, self.runs = START, 0.0, 0
        self.job = Job("count", 60, self._run, final=True)
        self.restart()

    def restart(self) -> None:
        blobs, settings = FolderBlobs(self.folder / "blobs"), Settings(data_dir=self.folder)
        watch = Watch(lambda: self.passed_s)
        self.context = JobContext(self.database, blobs, settings, load_prices(), lambda: self.now, watch)

    def _run(self, context: JobContext) -> Result:
        self.runs += 1
        return {"runs": self.runs}

    def wait(self, time: timedelta, *, beats: bool = True) -> None:
        """Let time pass: with a heartbeat now and then, or at the end alone."""
        self.now, self.passed_s = self.now + time, self.passed_s + time.total_seconds()
        self.beat() if beats else None

    def go_on(self, time: timedelta) -> None:
        for _ in range(time // timedelta(minutes=10)):
            self.wait(timedelta(minutes=10))

    def beat(self) -> None:
        run_if_due(self.context, JOBS["heartbeat"])

    def waits(self) -> bool:
        """Whether the job waits: each driver looks whether it is due, and tries to run it."""
        with self.database.read() as session:
            (state,) = (state for state in states(session, {"count": self.job}, self.now))
        ran = run_if_due(self.context, self.job) is not None
        assert state.due(self.now) == ran
        assert state.waits is not ran
        assert not (state.waits and state.overdue(self.now))
        with self.database.read() as session:
            assert read_gauges(session, self.now).time_believed is not state.waits
        return state.waits

    def told(self) -> list[bool]:
        """The alerts that were made: for each leap, whether it is over."""
        with self.database.read() as session:
            return [alert.resolved_at is not None for alert in session.query(tables.Alert).order_by(tables.Alert.id)]


@pytest.fixture
def clocks(any_database: Database, tmp_path: Path) -> Clocks:
    made = Clocks(any_database, tmp_path)
    made.beat()
    return made


@pytest.mark.parametrize("leap", [YEARS, HOUR, -2 * HOUR])
@pytest.mark.parametrize("restarted", [False, True])
def test_what_cannot_be_undone_waits_for_an_hour_and_goes_on_by_the_new_time(
    clocks: Clocks, leap: timedelta, restarted: bool
) -> None:
    assert not clocks.waits()
    clocks.now += leap
    if restarted:
        clocks.restart()
    assert clocks.waits()  # and nobody has written the leap down yet
    clocks.beat()
    assert clocks.waits()
    clocks.restart()  # it is written down
    clocks.go_on(timedelta(minutes=50))
    assert clocks.waits()
    assert clocks.told() == [False]
    clocks.go_on(timedelta(minutes=10))
    assert not clocks.waits()
    assert clocks.told() == [True]


def test_a_clock_that_was_ahead_for_a_moment_holds_up_for_an_hour(clocks: Clocks) -> None:
    clocks.now += YEARS
    clocks.beat()
    clocks.wait(timedelta(minutes=1))
    clocks.now -= YEARS
    assert clocks.waits()
    clocks.beat()
    clocks.go_on(timedelta(minutes=50))
    assert clocks.waits()
    clocks.go_on(timedelta(minutes=10))
    assert not clocks.waits()
    assert clocks.told() == [True, True]


def test_a_process_that_was_at_work_for_hours_has_seen_no_leap(clocks: Clocks) -> None:
    """As the single thread of a server is, that sweeps a bucket."""
    clocks.wait(5 * HOUR, beats=False)
    assert clocks.waits()  # until it has looked
    clocks.beat()
    assert not clocks.waits()
    assert clocks.told() == []


def test_the_clock_may_be_set_by_minutes(clocks: Clocks) -> None:
    for minutes in (20, -20):
        clocks.now += timedelta(minutes=minutes)
        clocks.restart()
        assert not clocks.waits()
        clocks.wait(timedelta(minutes=1))


def test_before_the_first_version_that_wrote_the_time_its_last_heartbeat_counts(clocks: Clocks) -> None:
    clocks.database.write_now(lambda session: setattr(session.get_one(tables.JobRun, "heartbeat"), "result", {}))
    assert not clocks.waits()
    clocks.now += YEARS
    assert clocks.waits()


def test_who_runs_it_by_hand_is_told_until_when_it_waits(clocks: Clocks) -> None:
    clocks.now += YEARS
    clocks.beat()
    with pytest.raises(TimeNotBelieved, match=r"2036-11-26 12:00 UTC.*wait until 2036-11-26 13:00 UTC"):
        run_now(clocks.context, clocks.job)
    run_now(clocks.context, Job("other", 60, clocks._run))
    assert clocks.runs == 1


def test_one_that_has_begun_goes_by_the_time_at_which_it_did(clocks: Clocks) -> None:
    """Sweeping a bucket takes minutes."""
    seen = []

    def run(context: JobContext) -> Result:
        clocks.now += YEARS
        seen.append(context.now() - START)
        return {}

    run_if_due(clocks.context, Job("long", 60, run, final=True))
    assert timedelta() <= seen[0] < HOUR


def test_what_deletes_takes_back_or_closes_by_the_time_is_final() -> None:
    assert {name for name, job in JOBS.items() if job.final} == {
        *("expire_checkpoints", "sweep_results", "forget_samples", "sweep_files"),
        *("expire_credit", "close_invoices", "meter_storage"),
    }


def test_whoever_asks_for_work_takes_no_credit_back_either(clocks: Clocks) -> None:
    """Nor is the work refused: the credit stays valid for the hour."""

    def prepare(session: Session) -> str:
        org_id = organisation_named(session, "acme").id
        set_mode(session, org_id, "prepaid", 0)
        grants.give(session, org_id, 10, expires_at=START + 48 * HOUR, now=START)
        return org_id

    org_id = clocks.database.write_now(prepare)

    def hold() -> int:
        def write(session: Session) -> int:
            check_left(session, Payer(org_id), clocks.now)
            return session.get_one(tables.Wallet, org_id).balance_nusd

        with acting_as(Caller(org_id, "key:1")):
            return clocks.database.write_now(write)

    assert hold() == 10
    clocks.now += YEARS
    assert hold() == 10
    assert grants.expire(clocks.database, clocks.now) == {"expired": 0}
    clocks.now -= YEARS
    clocks.wait(timedelta(minutes=1))
    clocks.wait(49 * HOUR)
    with pytest.raises(OutOfMoney):
        hold()
    assert grants.expire(clocks.database, clocks.now) == {"expired": 1}
