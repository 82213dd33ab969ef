"""Storage: bytes x time, each hour once, from the commit of a checkpoint to its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, strategies as st
from sqlalchemy.orm import Session

from billing.metering import storage
from billing.metering.storage import byte_hours, hours, meter
from billing.money.budgets import set_budget
from store import tables
from store.database.db import Database
from tests.billing.conftest import Till
from tests.billing.metering.kept import GB, GB_HOUR_NUSD, NOON, add_run, billed, delete, expire, save


@pytest.fixture(autouse=True)
def run(till: Till) -> None:
    till.database.write_now(add_run)


def test_each_full_hour_once(till: Till) -> None:
    save(till, NOON + timedelta(minutes=30))
    assert meter(till.database, till.prices, NOON + timedelta(minutes=59))["events"] == 0
    told = [
        meter(till.database, till.prices, NOON + timedelta(minutes=minutes))["nusd"]
        for minutes in (60, 61, 119, 120, 121)
    ]
    assert told == [69_444, 0, 0, GB_HOUR_NUSD, 0]
    assert billed(till) == [("12:30", GB // 2, 69_444), ("13:00", GB, GB_HOUR_NUSD)]
    (event, _) = till.rows(tables.UsageEvent)
    assert (event.kind, event.run_id, event.project_id, event.key_id, event.rate_uusd) == (
        "storage",
        "r",
        "p",
        1,
        10**5,
    )
    assert till.wallet().balance_nusd == -sum(amount for _, _, amount in billed(till))
    assert till.agrees()


def test_a_clock_that_is_years_ahead_for_a_moment_bills_a_week_which_then_is_paid(till: Till) -> None:
    save(till, NOON)
    meter(till.database, till.prices, NOON + timedelta(days=3650))
    assert sum(quantity for _, quantity, _ in billed(till)) == 168 * GB
    for hour in range(1, 169, 3):
        meter(till.database, till.prices, NOON + timedelta(hours=hour))
    assert sum(quantity for _, quantity, _ in billed(till)) == 168 * GB
    meter(till.database, till.prices, NOON + timedelta(hours=169))
    assert sum(quantity for _, quantity, _ in billed(till)) == 169 * GB
    assert till.agrees()


def test_what_was_deleted_by_a_clock_that_was_years_ahead_ends_when_the_clock_is_right(till: Till) -> None:
    save(till, NOON)
    delete(till, NOON + timedelta(days=3650))
    for minutes in (30, 90, 3000):
        meter(till.database, till.prices, NOON + timedelta(minutes=minutes))
    assert [quantity for _, quantity, _ in billed(till)] == [GB // 2]
    assert till.rows(tables.StorageSpan) == []
    assert till.agrees()


def test_what_was_stored_while_nobody_metered_is_billed_a_week_at_a_time(till: Till) -> None:
    save(till, NOON)
    back = NOON + timedelta(days=21, hours=1)
    delete(till, back - timedelta(hours=2))
    for week in (1, 2):
        meter(till.database, till.prices, back)
        assert sum(quantity for _, quantity, _ in billed(till)) == week * 168 * GB
    meter(till.database, till.prices, back)
    assert sum(quantity for _, quantity, _ in billed(till)) == (3 * 168 - 1) * GB
    assert till.rows(tables.StorageSpan) == []


def test_it_ends_with_the_deletion(till: Till) -> None:
    save(till, NOON)
    for other in ("b", "d"):  # without bytes, so that they cost nothing
        save(till, NOON, other, 0)
    delete(till, NOON + timedelta(minutes=90))
    for minutes in (100, 200, 300):
        meter(till.database, till.prices, NOON + timedelta(minutes=minutes))
    assert [quantity for _, quantity, _ in billed(till)] == [GB, GB // 2]
    on = {(span.checkpoint_id, span.started_at) for span in till.rows(tables.StorageSpan)}
    assert on == {("b", NOON), ("d", NOON)}
    assert till.agrees()


def test_within_an_hour_and_before_any_metering(till: Till) -> None:
    save(till, NOON)
    delete(till, NOON + timedelta(minutes=6))
    meter(till.database, till.prices, NOON + timedelta(minutes=7))
    assert [quantity for _, quantity, _ in billed(till)] == [GB // 10]


def test_it_ends_when_it_expires_however_late_that_is_noticed(till: Till) -> None:
    save(till, NOON)
    expire(till, "c", NOON + timedelta(minutes=30))
    meter(till.database, till.prices, NOON + timedelta(hours=5))
    assert [quantity for _, quantity, _ in billed(till)] == [GB // 2]


def test_a_deletion_nobody_told_of_ends_it_at_the_next_metering(till: Till) -> None:
    save(till, NOON)
    delete(till, NOON, end=False)
    assert meter(till.database, till.prices, NOON + timedelta(minutes=30))["ended"] == 1
    assert [quantity for _, quantity, _ in billed(till)] == [GB // 2]


def test_a_checkpoint_from_before_is_metered_from_now_on_unless_it_has_expired(till: Till) -> None:
    now = datetime.now(UTC)
    for name, hours_left in (("c", None), ("lives", 1), ("expired", -1)):
        save(till, NOON, name, begin=False)
        if hours_left is not None:
            expire(till, name, now + timedelta(hours=hours_left))
    assert meter(till.database, till.prices, now)["begun"] == 2
    spans = till.rows(tables.StorageSpan)
    assert {span.checkpoint_id for span in spans} == {"c", "lives"}
    assert all(span.started_at >= now for span in spans)


def test_bytes_and_hours_are_rounded_half_up() -> None:
    quarter = timedelta(minutes=15)
    assert [byte_hours(size, NOON, NOON + quarter) for size in range(8)] == [0, 0, 1, 1, 1, 1, 2, 2]


def test_who_saved_is_told_with_what_is_billed(till: Till) -> None:
    till.database.write_now(lambda session: setattr(session.get_one(tables.Session, "s"), "user_id", "u1"))
    save(till, NOON)
    meter(till.database, till.prices, NOON + timedelta(minutes=60))
    assert [event.user_id for event in till.rows(tables.UsageEvent)] == ["u1"]


def test_many_at_once(till: Till) -> None:
    for number in range(storage.AT_A_TIME + 5):
        save(till, NOON, f"c{number}", 10)
    counts = meter(till.database, till.prices, NOON + timedelta(hours=2))
    assert counts["events"] == 2 * (storage.AT_A_TIME + 5)
    assert till.agrees()


def test_two_that_meter_at_once_bill_once(till: Till) -> None:
    save(till, NOON)
    others = [Database(till.database.url) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda other: meter(other, till.prices, NOON + timedelta(hours=3)), others))
    for other in others:
        other.close()
    assert len(billed(till)) == 3
    assert till.agrees()


def test_two_that_meter_at_once_begin_a_checkpoint_once(till: Till) -> None:
    save(till, NOON, begin=False)
    others = [Database(till.database.url) for _ in range(2)]

    def adopt(other: Database) -> int:
        def work(session: Session) -> int:
            begun = storage._adopt(session, NOON)
            time.sleep(0.5)  # so the other process looks before this one commits
            return begun

        return other.write_now(work)

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(adopt, others)) == [0, 1]
    for other in others:
        other.close()
    assert len(till.rows(tables.StorageSpan)) == 1


def test_a_deletion_after_metering_began_waits_for_the_next_time(till: Till, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_meter_some", at_most(10, storage._meter_some))
    save(till, NOON)
    delete(till, NOON + timedelta(minutes=90, seconds=1))
    assert meter(till.database, till.prices, NOON + timedelta(minutes=90))["events"] == 1
    meter(till.database, till.prices, NOON + timedelta(hours=2))
    assert [quantity for _, quantity, _ in billed(till)] == [GB, byte_hours(GB, NOON, NOON + timedelta(seconds=1801))]
    assert till.agrees()


def test_a_budget_made_before_the_last_hour_of_a_month_is_metered(till: Till) -> None:
    december = datetime(2026, 12, 1, tzinfo=UTC)
    save(till, december - timedelta(hours=3))
    meter(till.database, till.prices, december - timedelta(minutes=30))
    till.database.write_now(
        lambda session: set_budget(session, "a", "org", "a", "month", GB, now=december + timedelta(minutes=1))
    )
    meter(till.database, till.prices, december + timedelta(minutes=5))
    assert len(billed(till)) == 3
    assert till.agrees()


def test_a_budget_knows_what_else_was_spent_in_months_whose_storage_is_not_metered_yet(till: Till) -> None:
    """The server was down from October to December, except for a little work in November."""
    october, november, december = (datetime(2026, month, 5, tzinfo=UTC) for month in (10, 11, 12))
    save(till, october)
    till.end(till.accept(9, at=november), now=november, train=9)
    till.database.write_now(lambda session: set_budget(session, "a", "org", "a", "month", GB, now=december))
    meter(till.database, till.prices, december)
    assert till.agrees()


def at_most(times: int, called: Callable[..., tuple[int, int]]) -> Callable[..., tuple[int, int]]:
    """Limits how often `called` runs: then it raises, so that no loop goes on for ever."""
    left = iter(range(times))

    def call(*arguments: Any) -> tuple[int, int]:
        next(left)
        return called(*arguments)

    return call


@given(
    st.integers(0, 10**15),
    st.datetimes(datetime(2026, 1, 1), datetime(2026, 2, 1), timezones=st.just(UTC)),
    st.timedeltas(timedelta(0), timedelta(days=3)),
)
def test_pieces_make_the_whole(size: int, start: datetime, length: timedelta) -> None:
    pieces = list(hours(start, start + length))
    assert sum(((stop - begun) for begun, stop in pieces), timedelta(0)) == length
    assert len({begun.replace(minute=0, second=0, microsecond=0) for begun, _ in pieces}) == len(pieces)
    assert all(begun == begun.replace(minute=0, second=0, microsecond=0) for begun, _ in pieces[1:])
    whole = byte_hours(size, start, start + length)
    assert abs(sum(byte_hours(size, *piece) for piece in pieces) - whole) <= len(pieces) / 2 + 1
