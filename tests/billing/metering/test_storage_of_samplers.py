"""Storage of weights without a name, and of those that lose it: until nobody samples from them any more."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

import msgspec
import pytest
from sqlalchemy.orm import Session

from billing.metering import storage
from billing.metering.quotas import stored_bytes
from billing.metering.storage import meter
from scheduler.order.plans import Load, Source
from store import tables
from store.tables import Checkpoint
from tests.billing.conftest import START, Till
from tests.billing.metering.kept import GB, GB_HOUR_NUSD, NOON, add_run, billed, delete, expire, save
from tests.rows import run_row, session_row


@pytest.fixture(autouse=True)
def run(till: Till) -> None:
    till.database.write_now(add_run)


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
