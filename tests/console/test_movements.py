"""The ledger page by page: every page adds up, and reads no more than its own days from the database."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import event, select
from sqlalchemy.orm import Session

from api.console.movements import DAYS, LINES, movements
from billing.metering.charges import Charge, settle
from billing.money import ledger
from billing.money.accounts import Payer
from billing.prices import load_prices
from store.database.db import Database
from store.tables import LedgerEntry, Organisation

NOW = datetime(2026, 11, 23, 15, tzinfo=UTC)
MODEL = "weft/tiny-moe"


def set_up(session: Session) -> None:
    """60 days with a top-up every third, work of many runs on some, and very many refunds on one; and a rival."""
    for org_id in ("a", "rival"):
        session.add(Organisation(id=org_id, name=org_id, created_at=NOW))
    session.flush()
    prices = load_prices()
    for back in range(0, 60, 3):
        at = NOW - timedelta(days=back)
        for org_id in ("a", "rival"):
            post(session, org_id, f"t{back}", 10**9 + back, at)
        runs = LINES + 7 if back == 3 else 2
        charges = [
            Charge(Payer("a"), "s", f"s:train:{run}", f"op{back}-{run}", MODEL, at, {"train": 1000 + run}, None)
            for run in range(runs)
        ]
        settle(session, charges, prices, at)
    for number in range(LINES + 40):
        post(session, "a", f"r{number}", 1 + number, NOW - timedelta(days=30, minutes=number))


def post(session: Session, org_id: str, name: str, amount_nusd: int, at: datetime) -> None:
    ledger.post(session, org_id=org_id, type="adjustment", amount_nusd=amount_nusd, ref_type="t", ref_id=name, at=at)


def test_all_pages_are_the_ledger(any_database: Database) -> None:
    any_database.write_now(set_up)
    with any_database.read() as session:
        entries = session.scalars(select(LedgerEntry).filter_by(org_id="a")).all()
        found, before, pages = [], None, 0
        while True:
            page, before = movements(session, "a", before)
            days = [line.day for line in page]
            assert days == sorted(days, reverse=True)
            assert len(set(days)) <= DAYS
            assert len(page) <= DAYS * 2 * (LINES + 1)
            found, pages = [*found, *page], pages + 1
            if before is None:
                break
    assert pages == 2
    by_day: dict[object, int] = {}
    for entry in entries:
        by_day[entry.at.date()] = by_day.get(entry.at.date(), 0) + entry.amount_nusd
    shown: dict[object, int] = {}
    for line in found:
        shown[line.day] = shown.get(line.day, 0) + line.amount_nusd
    assert shown == by_day
    assert [(line.others, line.others_are) for line in found if line.others] == [(7, "runs"), (40 + 1, "entries")]
    with any_database.read() as session:
        assert movements(session, "nobody") == ([], None)


def test_a_page_reads_its_own_days(database: Database) -> None:
    """By SQLite's own query plans: each query uses an index, and the first page does not read old entries."""
    database.write_now(set_up)
    asked: list[tuple[str, Any]] = []
    with database.read() as session:
        connection = session.connection()
        event.listen(connection, "before_cursor_execute", lambda *given: asked.append((given[2], given[3])))
        page, _ = movements(session, "a")
        questions = list(asked)
        plans = [connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", values).all() for sql, values in questions]
    told = [" ".join(str(row[3]) for row in plan) for plan in plans]
    assert len(told) <= 3 * (DAYS + 1) + 1
    for plan in told:
        assert "SCAN" not in plan, plan
        assert "ix_ledger_entries_not_usage" in plan or "usage_hourly" in plan, plan
    assert min(line.day for line in page) > (NOW - timedelta(days=3 * DAYS)).date()


def test_a_page_begins_before_a_day(database: Database) -> None:
    database.write_now(set_up)
    day = (NOW - timedelta(days=3)).date()
    with database.read() as session:
        page, _ = movements(session, "a", day)
    assert max(line.day for line in page) == day - timedelta(days=3)
