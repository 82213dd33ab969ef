"""Usage by run is added up by the database, exactly, however many hours there are."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Engine, event, insert

from billing.metering.usage import UsageRow, held_nusd, summary
from store.database.db import Database
from store.tables import Operation, Organisation, Sampler, UsageHour
from tests import rows

NOW = datetime(2026, 11, 1, tzinfo=UTC)
HOURS = 50


def hour(number: int, run_id: str, amount_nusd: int) -> dict[str, Any]:
    who = {"org_id": "a", "project_id": "", "key_id": 0, "user_id": "", "session_id": "s", "run_id": run_id}
    price = {"kind": "train", "base_model": "m", "price_version": "p", "rate_uusd": 1, "per_units": 10**6}
    sums = {"quantity": 3, "amount_nusd": amount_nusd, "events": 1}
    return {"hour": NOW + timedelta(hours=number)} | who | price | sums


def test_usage_of_a_run_is_the_sum_of_all_hours(any_database: Database) -> None:
    """Also beyond 64 bits. And the database does not send single hours: a busy organisation has a million a year."""
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


def test_what_is_held_of_a_run_is_of_its_samplers_too(any_database: Database) -> None:
    op: dict[str, Any] = {"org_id": "a", "session_id": "s", "kind": "sample", "base_model": "m", "state": "queued"}
    op |= {"tokens": 1, "body_ref": "", "body_sha256": "", "plan": {}, "accepted_at": NOW}
    lanes = {"s:train:0": 1, "s:sample:0": 2, "s:sample:1": 4, "s:train:1": 8}
    sampler: dict[str, Any] = {"org_id": "a", "session_id": "s", "base_model": "m", "adapter_ref": ""}
    sampler |= {"kind": "snapshot", "created_at": NOW}

    def write(session: Any) -> None:
        session.add(Organisation(id="a", name="a", created_at=NOW))
        session.flush()
        session.add(rows.session_row("a", NOW))
        session.flush()
        for number, run_id in enumerate(("s:train:0", None)):
            which = {"id": f"s:sample:{number}", "sampling_session_seq_id": number, "run_id": run_id}
            session.add(Sampler(**sampler, **which))
        for number, (lane, held) in enumerate(lanes.items()):
            session.add(Operation(**op, id=f"q{number}", lane=lane, seq=1, hold_nusd=held))
            session.add(Operation(**op | {"state": "done"}, id=f"d{number}", lane=lane, seq=2, hold_nusd=100))

    any_database.write_now(write)
    with any_database.read() as session:
        asked = [("a", None), ("a", "s:train:0"), ("a", "s:train:1"), ("a", "none"), ("b", "s:train:0")]
        assert [held_nusd(session, *who) for who in asked] == [15, 3, 8, 0, 0]
