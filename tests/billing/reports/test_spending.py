"""Reports add up to the events and the ledger, to the nano-dollar, by whatever dimension they are divided."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.metering.charges import Charge, settle
from billing.money.accounts import Payer
from billing.prices import load_prices
from billing.reports import spending
from billing.reports.spending import DIMENSIONS, DayRow, Dimension, Spent, Window
from store.database.db import Database
from store.people.organisations import organisation_named
from store.tables import LedgerEntry, UsageEvent, UsageHour

NOON = datetime(2026, 11, 20, 12, 30, tzinfo=UTC)
MODELS = ("m1", "m2")


@pytest.fixture
def org(any_database: Database) -> str:
    return any_database.write_now(lambda session: _fill(session))


def _fill(session: Session) -> str:
    """Four days, two models, runs with and without project, key and user; and somebody else's."""
    org_id, other = organisation_named(session, "o").id, organisation_named(session, "other").id
    for number in range(16):
        at = NOON - timedelta(hours=6 * number)
        payer = Payer(org_id, ("p1", None)[number % 2], (11, None)[number // 2 % 2])
        run, model, user = (f"r{number % 3}", MODELS[number % 2], ("u1", None)[number % 2])
        used = {"train": 1_000_003 + number, "sample": 7 * number + 1, "prefill": 13, "storage": 10**9 * number}
        charge = Charge(payer, "s", run, f"op{number}", model, at, used, None, user)
        settle(session, [charge], load_prices(), at)
    settle(session, [Charge(Payer(other), "s2", "r0", "x", "m1", NOON, {"train": 10**9}, None)], load_prices(), NOON)
    return org_id


def window(first: int = 1, last: int = 30) -> Window:
    return Window(date(2026, 11, first), date(2026, 11, last))


def test_every_cut_adds_up_to_the_ledger(any_database: Database, org: str) -> None:
    with any_database.read() as session:
        events = sum(session.scalars(select(UsageEvent.amount_nusd).filter_by(org_id=org)))
        ledger = -sum(session.scalars(select(LedgerEntry.amount_nusd).filter_by(org_id=org, type="usage")))
        assert events == ledger == spending.total(session, org, window()) > 0
        assert sum(row.amount_nusd for row in spending.by_day(session, org, window())) == events
        for dimension in DIMENSIONS:
            rows = spending.by_dimension(session, org, window(), dimension)
            assert sum(row.amount_nusd for row in rows) == events
            assert sum(row.amount_nusd for row in spending.by_day_and(session, org, window(), dimension)) == events


def test_days_are_utc(any_database: Database, org: str) -> None:
    with any_database.read() as session:
        rows = spending.by_day(session, org, window())
        for day in {row.day for row in rows}:
            events = select(UsageEvent).filter_by(org_id=org, kind="train")
            of_day = [event.quantity for event in session.scalars(events) if event.recorded_at.date() == day]
            assert [row.quantity for row in rows if (row.day, row.kind) == (day, "train")] == [sum(of_day)]
        assert spending.by_day(session, org, window(25, 30)) == []


@pytest.mark.parametrize(
    ("dimension", "value", "column"),
    [
        ("model", "m2", "base_model"),
        ("project", "p1", "project_id"),
        ("project", None, "project_id"),
        ("key", "11", "key_id"),
        ("key", None, "key_id"),
        ("user", None, "user_id"),
        ("run", "r1", "run_id"),
    ],
)
def test_narrowing(any_database: Database, org: str, dimension: Dimension, value: str | None, column: str) -> None:
    with any_database.read() as session:
        found = spending.total(session, org, spending.narrowed(window(), dimension, value))
        events = session.scalars(select(UsageEvent).filter_by(org_id=org))
        wanted = [e.amount_nusd for e in events if getattr(e, column) == (int(value) if value == "11" else value)]
    assert found == sum(wanted) > 0


def test_windows_are_of_whole_days_utc() -> None:
    now = datetime(2026, 2, 28, 20, tzinfo=timezone(timedelta(hours=-5)))
    assert spending.this_month(now) == Window(date(2026, 3, 1), date(2026, 3, 1))
    assert spending.this_month(now + timedelta(days=3)) == Window(date(2026, 3, 1), date(2026, 3, 4))
    assert spending.last_days(3, now) == Window(date(2026, 2, 27), date(2026, 3, 1))
    days = spending.last_days(3, now).days
    assert days == [date(2026, 2, 27), date(2026, 2, 28), date(2026, 3, 1)]
    rows = [DayRow(day, "train", 1, 1) for day in days]
    assert spending.in_window(rows, Window(days[0], days[1])) == rows[:2]
    assert spending.in_window(rows, Window(days[1], days[2])) == rows[1:]


def test_the_price_of_what_was_got_has_prompts_and_storage_in_it() -> None:
    used = {"train": (3, 10), "sample": (1, 5), "prefill": (1000, 4), "storage": (10**12, 1)}
    rows = [DayRow(date(2026, 3, 1), kind, *sums) for kind, sums in used.items()]
    assert spending.per_mtok_got(rows) == 5_000_000
    assert spending.per_mtok_got(rows[2:]) is None


def test_what_matches_nothing(any_database: Database, org: str) -> None:
    with any_database.read() as session:
        for dimension, value in (("key", "x"), ("key", "9" * 30), ("run", "r9"), ("kind", "other")):
            assert spending.total(session, org, spending.narrowed(window(), dimension, value)) == 0  # type: ignore[arg-type]


def test_a_run_over_time(any_database: Database, org: str) -> None:
    with any_database.read() as session:
        events = list(session.scalars(select(UsageEvent).filter_by(org_id=org, run_id="r0")))
        whole = spending.of_runs(session, org, ["r0", "r9"])
        assert whole == {
            "r0": Spent(
                sum(event.quantity for event in events if event.kind != "storage"),
                sum(event.amount_nusd for event in events),
            )
        }
        times = [NOON - timedelta(days=30), NOON - timedelta(days=2), NOON]
        before, half, now = spending.spent_by(session, org, "r0", [times])[0]
    assert before == Spent()
    assert now == whole["r0"]
    assert half.amount_nusd == sum(event.amount_nusd for event in events if event.recorded_at <= times[1])


def test_sums_beyond_64_bits(any_database: Database, org: str) -> None:
    """Byte-hours of a large store: SQLite's own SUM would fail."""
    big = 2**62 + 12_345

    def write(session: Session) -> None:
        row = session.scalars(select(UsageHour).filter_by(org_id=org, kind="storage")).first()
        assert row is not None
        names = [column.name for column in UsageHour.__table__.columns]
        for number in range(4):
            values = {name: getattr(row, name) for name in names} | {"session_id": f"big{number}", "quantity": big}
            session.add(UsageHour(**values))

    any_database.write_now(write)
    with any_database.read() as session:
        rows = spending.by_dimension(session, org, window(), "kind")
    (stored,) = [row.quantity for row in rows if row.name == "storage"]
    assert stored > 4 * big > 2**63
