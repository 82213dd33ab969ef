"""Storage: bytes x time, each hour once, from the commit of a checkpoint to its end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st
from sqlalchemy.orm import Session

from billing.metering import storage
from billing.metering.quotas import stored_bytes
from billing.metering.storage import byte_hours, hours, meter
from billing.money.budgets import set_budget
from scheduler.order.plans import Load, Source
from store import tables
from store.database.db import Database
from store.tables import Checkpoint
from tests.billing.conftest import START, Till
from tests.rows import run_row, session_row

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
GB = 10**9
#: A gigabyte for an hour, at $0.10 per GB-month.
GB_HOUR_NUSD = 138_889


@pytest.fixture(autouse=True)
def run(till: Till) -> None:
    till.database.write_now(add_run)


def add_run(session: Session) -> None:
    session.add(session_row("a", START, project_id="p", key_id=1))
    session.flush()
    session.add(run_row("a", START, "r"))


def save(till: Till, at: datetime, name: str = "c", size: int = GB, begin: bool = True) -> None:
    def write(session: Session) -> None:
        row = Checkpoint(
            id=name, org_id="a", run_id="r", kind="weights", name=name, ref=f"weights/{name}", size_bytes=size,
            public=False, user_metadata={}, created_at=at, expires_at=None,
        )  # fmt: skip
        session.add(row)
        session.flush()
        if begin:
            storage.begin(session, row, at)

    till.database.write_now(write)


def delete(till: Till, at: datetime, name: str = "c", end: bool = True) -> None:
    def write(session: Session) -> None:
        row = session.get_one(Checkpoint, name)
        if end:
            storage.end(session, [row], at)
        session.delete(row)

    till.database.write_now(write)


def expire(till: Till, name: str, at: datetime) -> None:
    till.database.write_now(lambda session: setattr(session.get_one(Checkpoint, name), "expires_at", at))


def billed(till: Till) -> list[tuple[str, int, int]]:
    events = sorted(till.rows(tables.UsageEvent), key=lambda event: event.accepted_at)
    return [(f"{event.accepted_at:%H:%M}", event.quantity, event.amount_nusd) for event in events]


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


def sampler(till: Till, ref: str, model_path: str | None = None) -> None:
    """A sampler of the run's session on weights in a folder: without a name, or those of a checkpoint."""

    def write(session: Session) -> None:
        row = tables.Sampler(
            id=f"{ref} {model_path}", org_id="a", session_id="s", sampling_session_seq_id=0, base_model="m",
            model_path=model_path, adapter_ref=f"weights/{ref}", run_id="r", kind="snapshot", created_at=NOON,
        )  # fmt: skip
        session.add(row)
        if model_path is None:
            storage.begin_sampler(session, row.adapter_ref, "r", GB, NOON)

    till.database.write_now(write)


def leave(till: Till) -> None:
    """The session ends, and storage is not told."""

    def write(session: Session) -> None:
        session.get_one(tables.Session, "s").state = "finished"

    till.database.write_now(write)


def test_weights_without_a_name_are_billed_until_their_session_is_over(till: Till) -> None:
    sampler(till, "u")
    meter(till.database, till.prices, NOON + timedelta(minutes=61))
    till.database.write_now(lambda session: storage.end_session(session, "s", NOON + timedelta(minutes=90)))
    leave(till)
    meter(till.database, till.prices, NOON + timedelta(minutes=200))
    assert [quantity for _, quantity, _ in billed(till)] == [GB, GB // 2]
    assert till.rows(tables.StorageSpan) == []
    sampler(till, "v")  # a save that ends after the session: nobody can sample from it
    assert till.rows(tables.StorageSpan) == []


def sampler_of_another_session(till: Till) -> None:
    def write(session: Session) -> None:
        session.add(session_row("a", START, "other", key_id=2))
        session.flush()
        session.add(run_row("a", START, "its run", "other"))
        session.flush()
        row = tables.Sampler(
            id="its sampler", org_id="a", session_id="other", sampling_session_seq_id=0, base_model="m",
            model_path=None, adapter_ref="weights/v", run_id="its run", kind="snapshot", created_at=NOON,
        )  # fmt: skip
        session.add(row)
        storage.begin_sampler(session, row.adapter_ref, "its run", GB, NOON)

    till.database.write_now(write)


def test_weights_whose_session_ended_unseen_are_billed_no_longer(till: Till) -> None:
    sampler_of_another_session(till)
    till.database.write_now(lambda session: session.add(session_row("a", START, "third")))
    sampler(till, "u")
    meter(till.database, till.prices, NOON)
    assert {span.checkpoint_id for span in till.rows(tables.StorageSpan)} == {"u", "v"}
    leave(till)
    meter(till.database, till.prices, NOON + timedelta(minutes=30))
    assert [quantity for _, quantity, _ in billed(till)] == [GB // 2]
    assert [span.checkpoint_id for span in till.rows(tables.StorageSpan)] == ["v"]


def test_a_checkpoint_is_billed_on_when_the_session_of_its_samplers_ends(till: Till) -> None:
    save(till, NOON, "c")
    sampler(till, "c", model_path="tinker://r/sampler_weights/c")
    till.database.write_now(lambda session: storage.end_session(session, "s", NOON + timedelta(minutes=30)))
    leave(till)
    meter(till.database, till.prices, NOON + timedelta(minutes=60))
    assert ("12:00", GB, GB_HOUR_NUSD) in billed(till)


def other_session(till: Till, org_id: str, ref: str, name: str = "") -> None:
    """A younger session, of the same organisation or another, with a sampler on weights that have a name."""
    name = name or f"of {org_id}"

    def write(session: Session) -> None:
        session.add(session_row(org_id, START + timedelta(minutes=1), name, key_id=2))
        session.flush()
        row = tables.Sampler(
            id=f"{org_id} {ref}", org_id=org_id, session_id=name, sampling_session_seq_id=0, base_model="m",
            model_path="tinker://r/sampler_weights/c", adapter_ref=ref, run_id=None, kind="snapshot", created_at=NOON,
        )  # fmt: skip
        session.add(row)

    till.database.write_now(write)


def load(till: Till, ref: str, lane: str = "r", session_id: str = "s") -> None:
    """The run was loaded from weights, and would be rebuilt from them."""
    row = tables.Operation(
        id="load", org_id="a", session_id=session_id, lane=lane, seq=1, kind="load_state", base_model="m", state="done",
        tokens=0, body_ref="", body_sha256="", accepted_at=NOON,
        plan=msgspec.to_builtins(Load(Source(ref, "tinker://r/weights/c", with_optimizer=True))),
    )  # fmt: skip
    till.database.write_now(lambda session: session.add(row))


def end_session(till: Till, name: str, minutes: int) -> None:
    def write(session: Session) -> None:
        session.get_one(tables.Session, name).state = "finished"
        storage.end_session(session, name, NOON + timedelta(minutes=minutes))

    till.database.write_now(write)


@pytest.mark.parametrize("ended", ["s", "other"])
def test_the_end_of_a_session_ends_what_its_own_samplers_are_on(till: Till, ended: str) -> None:
    sampler(till, "u")
    sampler_of_another_session(till)
    end_session(till, ended, 30)
    meter(till.database, till.prices, NOON + timedelta(hours=1))
    hours_of = {event.run_id: event.quantity / GB for event in till.rows(tables.UsageEvent)}
    assert hours_of == {"r": 0.5 if ended == "s" else 1, "its run": 0.5 if ended == "other" else 1}


class TestWeightsThatLoseTheirName:
    """They stay stored for the samplers and runs that use them, and are billed as long as these do."""

    def stored(self, till: Till) -> int:
        with till.database.read() as session:
            return stored_bytes(session, "a")

    def minutes(self, till: Till) -> dict[tuple[str, str | None], int]:
        """How long a gigabyte was billed, by organisation and run."""
        meter(till.database, till.prices, NOON + timedelta(hours=9))
        found = Counter[tuple[str, str | None]]()
        for event in till.rows(tables.UsageEvent):
            found[event.org_id, event.run_id] += round(event.quantity * 60 / GB)
        assert till.agrees()
        return dict(found)

    @pytest.mark.parametrize("use", ["sampled", "loaded"])
    def test_are_billed_until_the_session_is_over(self, till: Till, use: str) -> None:
        till.database.write_now(lambda db: db.add_all([session_row("a", START, other) for other in ("before", "then")]))
        save(till, NOON)
        if use == "sampled":
            sampler(till, "c", model_path="tinker://r/sampler_weights/c")
        else:
            load(till, "weights/c")
        delete(till, NOON + timedelta(minutes=30))
        assert self.stored(till) == GB
        end_session(till, "s", 90)
        assert self.stored(till) == 0
        assert self.minutes(till) == {("a", "r"): 90}

    @pytest.mark.parametrize("closed", [False, True])
    def test_without_anybody_on_them_they_are_gone(self, till: Till, closed: bool) -> None:
        """A closed run that was loaded from them does not use them any more."""
        save(till, NOON)
        if closed:
            load(till, "weights/c")
            till.database.write_now(lambda session: session.add_all([run_row("a", START, other) for other in "bz"]))
            till.database.write_now(lambda session: setattr(session.get_one(tables.Run, "r"), "state", "closed"))
        delete(till, NOON + timedelta(minutes=30))
        assert (self.stored(till), self.minutes(till)) == (0, {("a", "r"): 30})

    @pytest.mark.parametrize("heir", ["before s", "t, behind it"])
    def test_once_however_many_sessions_are_on_them(self, till: Till, heir: str) -> None:
        save(till, NOON)
        sampler(till, "c", model_path="tinker://r/sampler_weights/c")
        other_session(till, "a", "weights/c", heir)
        delete(till, NOON + timedelta(minutes=30))
        assert self.stored(till) == GB
        end_session(till, "s", 60)
        assert self.stored(till) == GB
        end_session(till, heir, 150)
        assert self.minutes(till) == {("a", "r"): 150}

    @pytest.mark.parametrize("both", ["c", "d"])
    def test_of_two_that_a_session_leaves_those_go_on_that_another_is_on(self, till: Till, both: str) -> None:
        for name in ("c", "d"):
            save(till, NOON, name)
            sampler(till, name, model_path=f"tinker://r/sampler_weights/{name}")
        other_session(till, "a", f"weights/{both}")
        for name in ("c", "d"):
            delete(till, NOON + timedelta(minutes=30), name)
        end_session(till, "s", 60)
        end_session(till, "of a", 90)
        assert self.minutes(till) == {("a", "r"): 60 + 90}

    @pytest.mark.parametrize("first", ["s", "of a"])
    def test_each_until_its_own_session_is_over(self, till: Till, first: str) -> None:
        for name in ("c", "d"):
            save(till, NOON, name)
        sampler(till, "c", model_path="tinker://r/sampler_weights/c")
        other_session(till, "a", "weights/d")
        for name in ("c", "d"):
            delete(till, NOON + timedelta(minutes=30), name)
        end_session(till, first, 60)
        end_session(till, "of a" if first == "s" else "s", 90)
        assert self.minutes(till) == {("a", "r"): 60 + 90}

    def test_each_by_its_own_size_where_many_lose_it_at_once(self, till: Till, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(storage, "AT_A_TIME", 2)
        names = ("d", "c", "e", "f")
        for size, name in enumerate(names, 1):
            save(till, NOON, name, size * GB)
            sampler(till, name, model_path=f"tinker://r/sampler_weights/{name}")

        def lose(session: Session) -> None:
            rows = [session.get_one(Checkpoint, name) for name in names]
            storage.end(session, rows, NOON + timedelta(minutes=30))
            for row in rows:
                session.delete(row)

        till.database.write_now(lose)
        end_session(till, "s", 90)
        assert self.minutes(till) == {("a", "r"): (1 + 2 + 3 + 4) * 90}

    @pytest.mark.parametrize("use", ["sampled", "loaded"])
    def test_not_by_a_session_that_was_over_before(self, till: Till, use: str) -> None:
        save(till, NOON)
        sampler(till, "c", model_path="tinker://r/sampler_weights/c")
        other_session(till, "a", "weights/c" if use == "sampled" else "weights/others")
        till.database.write_now(lambda session: session.add(run_row("a", START, "other run", "of a")))
        if use == "loaded":
            load(till, "weights/c", "other run", "of a")
        delete(till, NOON + timedelta(minutes=30))
        end_session(till, "of a", 60)
        end_session(till, "s", 90)
        assert self.stored(till) == 0
        assert self.minutes(till) == {("a", "r"): 90}

    @pytest.mark.parametrize(("expires", "named"), [(None, 60), (300, 60), (20, 20)])
    def test_not_beside_another_checkpoint_of_the_same(self, till: Till, expires: int | None, named: int) -> None:
        """Unless the other has expired before: then they are billed from the end of the first."""
        save(till, NOON)
        save(till, NOON, "copy")
        if expires is not None:
            expire(till, "copy", NOON + timedelta(minutes=expires))
        till.database.write_now(lambda session: setattr(session.get_one(Checkpoint, "copy"), "ref", "weights/c"))
        sampler(till, "c", model_path="tinker://r/sampler_weights/c")
        delete(till, NOON + timedelta(minutes=30))
        delete(till, NOON + timedelta(minutes=60), "copy")
        end_session(till, "s", 90)
        assert self.minutes(till) == {("a", "r"): 30 + named + (90 - (60 if named == 60 else 30))}

    def test_by_who_samples_what_another_had_published(self, till: Till) -> None:
        save(till, NOON)
        other_session(till, "b", "weights/c")
        delete(till, NOON + timedelta(minutes=30))
        end_session(till, "of b", 60)
        assert self.minutes(till) == {("a", "r"): 30, ("b", None): 30}

    @pytest.mark.parametrize(("a", "b"), [(60, 90), (90, 60)])
    def test_by_each_organisation_for_as_long_as_its_own_are_on_them(self, till: Till, a: int, b: int) -> None:
        save(till, NOON)
        sampler(till, "c", model_path="tinker://r/sampler_weights/c")
        other_session(till, "b", "weights/c")
        delete(till, NOON + timedelta(minutes=30))
        for minutes, name in sorted([(a, "s"), (b, "of b")]):
            end_session(till, name, minutes)
        assert self.minutes(till) == {("a", "r"): a, ("b", None): b - 30}

    def test_also_where_the_name_is_saved_again(self, till: Till) -> None:
        """The checkpoint keeps its id for the new weights; its end does not end the billing of the old ones."""
        save(till, NOON)
        sampler(till, "c", model_path="tinker://r/sampler_weights/c")

        def overwrite(session: Session) -> None:
            row, at = session.get_one(Checkpoint, "c"), NOON + timedelta(minutes=30)
            storage.end(session, [row], at)
            row.ref = "weights/newer"
            session.flush()
            storage.begin(session, row, at)

        till.database.write_now(overwrite)
        delete(till, NOON + timedelta(minutes=60))
        end_session(till, "s", 90)
        assert self.minutes(till) == {("a", "r"): 60 + 60}

    def test_after_an_expiry_that_was_noticed_late(self, till: Till) -> None:
        save(till, NOON)
        sampler(till, "c", model_path="tinker://r/sampler_weights/c")
        expire(till, "c", NOON + timedelta(minutes=30))
        for minutes in (100, 200):
            meter(till.database, till.prices, NOON + timedelta(minutes=minutes))
        delete(till, NOON + timedelta(minutes=210))
        end_session(till, "s", 240)
        assert self.minutes(till) == {("a", "r"): 240}

    def test_and_no_longer_when_nobody_told_of_the_end_of_the_session(self, till: Till) -> None:
        save(till, NOON)
        sampler(till, "c", model_path="tinker://r/sampler_weights/c")
        delete(till, NOON + timedelta(minutes=30))
        leave(till)
        meter(till.database, till.prices, NOON + timedelta(minutes=60))
        assert (self.stored(till), self.minutes(till)) == (0, {("a", "r"): 60})


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
