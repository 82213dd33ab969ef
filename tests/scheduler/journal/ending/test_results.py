"""How long results are kept, on both databases and a real folder, with a clock that the test moves."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import insert, select, update

from scheduler.journal.ending import results
from scheduler.journal.ending.outcomes import Answers, result_ref
from scheduler.journal.ending.results import BATCH, FETCHED_LAST, RESULTS_LAST, Results, forget_samples
from scheduler.order.operations import Gone, Outcome
from store import tables
from store.blobs.folder import FolderBlobs
from store.database.db import Database
from tests.keys import create_key

NOW = datetime.now(UTC)
MINUTE = timedelta(minutes=1)


class World:
    def __init__(self, database: Database, blobs: FolderBlobs) -> None:
        self.database, self.blobs = database, blobs
        self.orgs: dict[str, str] = {}

    def org(self, name: str) -> str:
        if name not in self.orgs:
            self.database.write_now(lambda session: create_key(session, name))
            with self.database.read() as session:
                query = select(tables.Organisation.id).where(tables.Organisation.name == name)
                self.orgs[name] = session.scalars(query).one()
        return self.orgs[name]

    def result(self, name: str, size: int, age: timedelta, fetched: timedelta | None = None, org: str = "acme") -> str:
        """A result of `size` bytes, with the times since it was made and since it was fetched."""
        self.add(org, [(name, size, age, fetched)])
        self.blobs.put(result_ref(name), b"x" * size)
        return name

    def add(self, org: str, results: list[tuple[str, int, timedelta, timedelta | None]]) -> None:
        org_id = self.org(org)
        rows: list[dict[str, Any]] = [
            {
                "id": name, "org_id": org_id, "session_id": "s", "lane": org, "seq": hash(name) % 2**60,
                "kind": "sample", "base_model": "m", "state": "done", "tokens": 0, "body_ref": "", "body_sha256": "",
                "plan": {}, "accepted_at": NOW - age, "finished_at": NOW - age, "result_ref": result_ref(name),
                "result_type": "text/plain", "result_bytes": size,
                "fetched_at": None if fetched is None else NOW - fetched,
            }
            for name, size, age, fetched in results
        ]  # fmt: skip
        self.database.write_now(lambda session: session.execute(insert(tables.Operation), rows))

    def sweep(self, limit_bytes: int = 10**9, later: timedelta = timedelta()) -> int:
        return Results(self.database, self.blobs, limit_bytes, lambda: NOW + later).sweep()

    def kept(self) -> set[str]:
        """The results that rows say are kept; the blobs must be the same."""
        with self.database.read() as session:
            rows = session.scalars(select(tables.Operation)).all()
        for row in rows:
            assert self.blobs.exists(result_ref(row.id)) == (row.result_bytes is not None)
        return {row.id for row in rows if row.result_bytes is not None}

    def answer(self, name: str, org: str = "acme") -> Any:
        return Answers(self.database, self.blobs).stored(self.org(org), name)


@pytest.fixture
def world(any_database: Database, blobs: FolderBlobs) -> World:
    return World(any_database, blobs)


def test_a_fetched_result_goes_when_its_client_has_had_time_to_ask_again(world: World) -> None:
    world.result("just", 5, age=9 * MINUTE, fetched=FETCHED_LAST - MINUTE)
    world.result("before", 5, age=30 * MINUTE, fetched=FETCHED_LAST + MINUTE)
    world.result("never", 5, age=RESULTS_LAST - MINUTE)
    world.result("old", 5, age=RESULTS_LAST + MINUTE)
    assert world.sweep() == 2
    assert world.kept() == {"just", "never"}
    assert world.answer("just") == Outcome(b"x" * 5, "text/plain")
    assert world.answer("before") == Gone()
    assert world.sweep() == 0
    assert world.sweep(later=2 * MINUTE) == 2
    assert world.kept() == set()


def test_beyond_the_limit_fetched_ones_go_first_and_then_the_oldest(world: World) -> None:
    world.result("oldest", 10, age=60 * MINUTE)
    world.result("older", 10, age=50 * MINUTE)
    world.result("new", 10, age=1 * MINUTE)
    world.result("had", 10, age=40 * MINUTE, fetched=2 * MINUTE)
    world.result("had-earlier", 10, age=30 * MINUTE, fetched=3 * MINUTE)
    assert world.sweep(limit_bytes=50) == 0
    assert world.sweep(limit_bytes=49) == 1
    assert world.kept() == {"oldest", "older", "new", "had"}
    assert world.sweep(limit_bytes=21) == 2
    assert world.kept() == {"older", "new"}
    assert world.sweep(limit_bytes=20) == 0
    assert world.sweep(limit_bytes=9) == 2
    assert world.kept() == set()


def test_the_limit_is_of_each_organisation(world: World) -> None:
    for org in ("acme", "rival"):
        for number in range(3):
            world.result(f"{org}{number}", 10, age=(10 - number) * MINUTE, org=org)
    world.result("more", 10, age=20 * MINUTE)
    assert world.sweep(limit_bytes=30) == 1
    assert world.kept() == {f"{org}{number}" for org in ("acme", "rival") for number in range(3)}


def test_six_tenants_who_fetch_what_they_make_stay_bounded(world: World) -> None:
    """Each makes a result of 1,000 bytes every minute for three quarters of an hour, and fetches it at once: kept are
    those fetched within FETCHED_LAST, never more than the limit."""
    most = 0
    for minute in range(45):
        at = minute * MINUTE
        for org in range(6):
            name = f"{org}-{minute}"
            world.result(name, 1000, age=-at, fetched=-at, org=f"org{org}")
        world.sweep(limit_bytes=8_000 if minute > 22 else 10**6, later=at)
        kept = sum(world.blobs.size_bytes(result_ref(f"{org}-{m}")) for org in range(6) for m in range(minute + 1)
                   if world.blobs.exists(result_ref(f"{org}-{m}")))  # fmt: skip
        most = max(most, kept) if minute <= 22 else most
        assert minute <= 22 or kept <= 6 * 8_000
    assert most == 6 * 1000 * (FETCHED_LAST // MINUTE)


def test_what_cannot_be_deleted_still_counts_and_holds_up_nothing(world: World) -> None:
    world.result("had", 10, age=30 * MINUTE, fetched=20 * MINUTE)
    stuck = world.result("stuck", 10, age=30 * MINUTE, fetched=20 * MINUTE)
    world.blobs.delete(result_ref(stuck))
    world.blobs.path(result_ref(stuck)).mkdir()  # unlinking a folder is an OSError for everybody, root too
    assert world.sweep() == 1
    assert world.kept() == {stuck}
    world.blobs.path(result_ref(stuck)).rmdir()
    assert world.sweep() == 1
    assert world.kept() == set()


def test_many_are_deleted_in_many_writes_and_blobs_that_are_gone_hold_up_nothing(world: World) -> None:
    many = [(f"{number}", 7, RESULTS_LAST + MINUTE, None) for number in range(2 * BATCH + 1)]
    world.add("acme", many)
    assert world.sweep() == 2 * BATCH + 1
    assert world.kept() == set()


def test_results_in_rows_are_deleted_as_files_are(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no blob is looked for."""
    deleted, delete = list[str](), world.blobs.delete
    monkeypatch.setattr(world.blobs, "delete", lambda ref: (deleted.append(ref), delete(ref)))
    org_id = world.org("acme")
    world.result("file", 10, timedelta())
    step = {
        "id": "row", "org_id": org_id, "session_id": "s", "lane": "acme", "seq": 1, "kind": "optim_step",
        "base_model": "m", "state": "done", "tokens": 0, "body_ref": "", "body_sha256": "", "plan": {},
        "accepted_at": NOW, "finished_at": NOW, "result": "{}", "result_type": "application/json", "result_bytes": 2,
    }  # fmt: skip
    world.database.write_now(lambda session: session.execute(insert(tables.Operation), [step]))
    assert world.answer("row") == Outcome(b"{}")
    assert world.sweep(later=RESULTS_LAST) == 2
    assert (world.answer("row"), world.answer("file")) == (Gone(), Gone())
    assert deleted == [result_ref("file")]
    with world.database.read() as session:
        assert session.get_one(tables.Operation, "row").result is None


def test_old_samples_are_forgotten_and_nothing_else(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are. What has not ended, is not old, still has its result, or belongs to a run stays."""
    monkeypatch.setattr(results, "BATCH", 2)
    monkeypatch.setattr(results, "LOOK", 4)
    day = timedelta(days=1)
    world.add("acme", [(name, 1, age * day, None) for name, age in (("kept", 9), ("young", 1), *_old(11))])
    others: dict[str, dict[str, Any]] = {"step": {"kind": "optim_step"}, "queued": {"finished_at": None}}
    world.add("acme", [(name, 1, 9 * day, None) for name in others])

    def write(session: Any) -> None:
        gone = update(tables.Operation).where(tables.Operation.id != "kept")
        session.execute(gone.values(result_bytes=None))
        for name, values in others.items():
            session.execute(update(tables.Operation).filter_by(id=name).values(**values))

    world.database.write_now(write)
    assert forget_samples(world.database, NOW - 5 * day) == 11
    assert forget_samples(world.database, NOW - 5 * day) == 0
    with world.database.read() as session:
        assert set(session.scalars(select(tables.Operation.id))) == {"kept", "young", *others}


def _old(number: int) -> list[tuple[str, int]]:
    return [(f"old {each}", 9) for each in range(number)]
