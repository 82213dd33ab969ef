"""Usage by run is added up by the database, exactly, however many hours there are."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Engine, event, insert

from billing.metering.usage import UsageRow, summary
from store.database.db import Database
from store.tables import Organisation, UsageHour

NOW = datetime(2026, 11, 1, tzinfo=UTC)
HOURS = 50


def hour(number: int, run_id: str, amount_nusd: int) -> dict[str, Any]:
    who = {"org_id": "a", "project_id": "", "key_id": 0, "user_id": "", "session_id": "s", "run_id": run_id}
    price = {"kind": "train", "base_model": "m", "price_version": "p", "rate_uusd": 1, "per_units": 10**6}
    sums = {"quantity": 3, "amount_nusd": amount_nusd, "events": 1}
    return {"hour": NOW + timedelta(hours=number)} | who | price | sums


def test_it_is_the_sum_of_all_hours(any_database: Database) -> None:
    """Beyond 64 bits, too; and no hour leaves the database by itself: a year of a busy organisation has a million."""
    rows = [hour(number, run_id, 2**62 + number) for number in range(HOURS) for run_id in ("", "r")]

    def write(session: Any) -> None:
        session.add(Organisation(id="a", name="a", created_at=NOW))
        session.flush()
        session.execute(insert(UsageHour), rows)

    any_database.write_now(write)
    asked: list[str] = []

    def note(_of: Any, _cursor: Any, statement: str, *_: Any) -> None:
        asked.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        with any_database.read() as session:
            found = summary(session, "a")
            late = summary(session, "a", "r", NOW + timedelta(hours=HOURS - 1))
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    total = HOURS * 2**62 + sum(range(HOURS))
    assert found == [UsageRow(run_id, "train", "m", 3 * HOURS, total) for run_id in (None, "r")]
    assert late == [UsageRow("r", "train", "m", 3, 2**62 + HOURS - 1)]
    assert all("GROUP BY" in statement for statement in asked if "usage_hourly" in statement)
