"""The reaper on a real database and folder, with a clock that the test moves."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scheduler.jobs.reaper import Reaper
from scheduler.journal.ending.references import in_use
from scheduler.links.messages import RunSpec
from scheduler.order.plans import BODY_ONLY, Create, Load, Plan, Sample, Save, Source
from store import tables
from store.blobs.folder import FolderBlobs
from tests.keys import create_key
from tests.migrated import database_in
from tests.rows import run_row, session_row

NOW = datetime.now(UTC)
SPEC = RunSpec("s:train:0", "m", 8, 32.0, 0, train_attn=True, train_mlp=True, train_unembed=True)


def source(ref: str) -> Source:
    return Source(ref, "tinker://another/weights/a", with_optimizer=True)


class World:
    def __init__(self, root: Path) -> None:
        self.database = database_in(root)
        self.blobs = FolderBlobs(root / "blobs")
        self.now = NOW
        self.reaper = Reaper(self.database, self.blobs, lambda: self.now)
        self.database.write_now(lambda session: create_key(session, "acme"))
        with self.database.read() as session:
            self.org = session.query(tables.Organisation).one().id

    def add(self, *rows: Any) -> None:
        self.database.write_now(lambda session: [(session.add(row), session.flush()) for row in rows])

    def session(self, name: str, state: str = "active") -> tables.Session:
        return session_row(self.org, NOW, name, state=state)

    def run(self, session: str, state: str = "live") -> tables.Run:
        return run_row(self.org, NOW, f"{session}:train:0", session, state=state)

    def checkpoint(self, run: str, ref: str, name: str = "c", expires_at: datetime | None = None) -> tables.Checkpoint:
        return tables.Checkpoint(
            id=f"{run}-{name}", org_id=self.org, run_id=run, kind="weights", name=name, ref=ref, size_bytes=1,
            public=False, user_metadata={}, created_at=NOW, expires_at=expires_at,
        )  # fmt: skip

    def span(self, checkpoint: str) -> tables.StorageSpan:
        return tables.StorageSpan(
            id=checkpoint, org_id=self.org, checkpoint_id=checkpoint, run_id="s:train:0", session_id="s",
            base_model="m", size_bytes=1, started_at=NOW, metered_until=NOW,
        )  # fmt: skip

    def sampler(self, session: str, ref: str, number: int = 0) -> tables.Sampler:
        return tables.Sampler(
            id=f"{session}:sample:{number}", org_id=self.org, session_id=session, sampling_session_seq_id=number,
            base_model="m", adapter_ref=ref, kind="snapshot", created_at=NOW,
        )  # fmt: skip

    def operation(self, name: str, lane: str, kind: str, state: str, plan: Plan) -> tables.Operation:
        return tables.Operation(
            id=name, org_id=self.org, session_id="s", lane=lane, seq=hash(name) % 10**6, kind=kind, base_model="m",
            state=state, tokens=0, body_ref=f"ops/{name[:2]}/{name}", body_sha256="",
            plan=msgspec.to_builtins(plan), accepted_at=NOW,
        )  # fmt: skip

    def folder(self, ref: str) -> str:
        folder = self.blobs.path(ref)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "f").write_bytes(b"x")
        return ref

    def file(self, ref: str, hours_old: float = 0) -> str:
        self.blobs.put(ref, b"x")
        then = (NOW - timedelta(hours=hours_old)).timestamp()
        os.utime(self.blobs.path(ref), (then, then))
        return ref

    def twice(self) -> list[str]:
        assert [ref for ref in self.reaper.sweep() if ref.startswith(("weights", "runs"))] == []
        return self.reaper.sweep()


@pytest.fixture
def world(tmp_path: Path) -> Any:
    made = World(tmp_path)
    yield made
    made.database.close()


def test_a_checkpoint_expires_and_then_its_files_go(world: World) -> None:
    soon = NOW + timedelta(hours=1)
    world.add(world.session("s"), world.run("s"))
    world.add(
        world.checkpoint("s:train:0", world.folder("weights/a"), "a", soon),
        world.checkpoint("s:train:0", world.folder("weights/b"), "b"),
        *(world.span(f"s:train:0-{name}") for name in ("a", "b")),
    )
    assert world.reaper.expire() == 0
    assert world.twice() == []
    world.now = soon + timedelta(minutes=5)
    assert world.reaper.expire() == 1
    assert world.twice() == ["weights/a"]
    with world.database.read() as session:
        assert [row.name for row in session.query(tables.Checkpoint)] == ["b"]
        ends = {span.checkpoint_id: span.ended_at for span in session.query(tables.StorageSpan)}
        assert ends == {"s:train:0-a": soon, "s:train:0-b": None}, "what it has stored is paid up to then"
        event = session.query(tables.AuditEntry).filter_by(event="checkpoint_expired").one()
    assert (event.target, event.key_id) == ("tinker://s:train:0/weights/a", None)


def test_shared_files_stay_for_the_last_who_needs_them(world: World) -> None:
    """A copy, an active sampler, a live run that was loaded from them, and a save that is not settled yet."""
    world.add(world.session("s"), world.run("s"), world.session("old", "finished"), world.run("old", "closed"))
    refs = [world.folder(f"weights/{name}") for name in ("copy", "sampler", "loaded", "saving", "over", "done", "late")]
    saved = world.folder("weights/saved")  # whose checkpoint has been deleted
    world.add(
        world.checkpoint("old:train:0", refs[0], "copy"),
        world.sampler("s", refs[1]),
        world.operation("load", "s:train:0", "create", "done", Create(SPEC, "interactive", source(refs[2]))),
        world.operation("saving", "s:train:0", "save_state", "queued", Save("weights", "a")),
        world.operation("saved", "s:train:0", "save_state", "done", Save("weights", "b")),
        world.sampler("old", refs[4]),
        world.operation("sampled", "old:sample:0", "sample", "done", Sample(1, 1, "interactive")),
        world.operation("lo-old", "old:train:0", "load_state", "done", Load(source(refs[5]))),
        world.sampler("old", refs[6], 1),
        world.operation("sample", "old:sample:1", "sample", "queued", Sample(1, 1, "interactive")),
    )
    assert world.twice() == [refs[5], refs[4], saved]
    with world.database.read() as session:
        assert [in_use(session, ref) for ref in refs] == [True, True, True, True, False, False, True]


def test_one_round_is_not_enough(world: World) -> None:
    world.folder("weights/a")
    world.reaper.sweep()
    world.add(world.session("s"), world.sampler("s", "weights/a"))
    assert world.reaper.sweep() == []
    assert world.blobs.exists("weights/a")


def test_snapshots_of_closed_runs_go(world: World) -> None:
    world.add(world.session("s"), world.run("s"), world.session("t"), world.run("t", "closed"))
    world.folder("runs/s:train:0/state-3")
    world.folder("runs/t:train:0/state-3")
    assert world.twice() == ["runs/t:train:0"]


def test_results_archives_and_bodies_by_age(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few bodies the database is asked for at a time."""
    monkeypatch.setattr("scheduler.jobs.reaper.BATCH", 1)
    world.add(world.session("s"), world.run("s"), world.session("t"), world.run("t", "closed"))
    world.add(
        world.operation("aa1", "s:train:0", "optim_step", "done", BODY_ONLY),
        world.operation("aa2", "t:train:0", "optim_step", "done", BODY_ONLY),
        world.operation("aa3", "t:sample:0", "sample", "queued", Sample(1, 1, "interactive")),
    )
    for name in ("aa1", "aa2", "aa3"):
        world.file(f"ops/aa/{name}", hours_old=30)
    world.file("ops/aa/aa4", hours_old=1)
    world.file("results/aa/aa1", hours_old=23)
    world.file("results/aa/aa2", hours_old=25)
    old = world.blobs.path(world.folder("archives/old"))
    os.utime(old, ((NOW - timedelta(hours=3)).timestamp(),) * 2)
    world.folder("archives/new")
    assert sorted(world.reaper.sweep()) == ["archives/old", "ops/aa/aa2", "results/aa/aa2"]


def test_what_is_asked_for_again_while_others_are_deleted_stays(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep may take minutes: meanwhile somebody gets a link to an archive, or trains on recorded logprobs."""
    old = ((NOW - timedelta(hours=30)).timestamp(),) * 2
    for name in ("a", "b"):
        os.utime(world.blobs.path(world.folder(f"archives/{name}")), old)
        world.file(f"stability/s/{name}", hours_old=30)
    delete_tree = world.blobs.delete_tree

    def touched_meanwhile(ref: str) -> None:
        if ref == "archives/a":
            for used in ("archives/b", "stability/s/b"):
                world.blobs.touch(used)
        delete_tree(ref)

    monkeypatch.setattr(world.blobs, "delete_tree", touched_meanwhile)
    assert world.reaper.sweep() == ["archives/a", "stability/s/a"]
    assert world.blobs.exists("archives/b")
    assert world.blobs.exists("stability/s/b")


def test_recordings_go_after_a_day_and_custom_losses_with_their_session(world: World) -> None:
    world.add(world.session("s"), world.session("t", "finished"), world.session("u", "finished"), world.run("u"))
    for session in ("s", "t", "u"):
        world.file(f"losses/{session}:loss:0", hours_old=30)
    world.file("losses/t:loss:1", hours_old=1)
    world.file("stability/s/op:0", hours_old=30)
    world.file("stability/s/op:1", hours_old=20)
    world.file("handoff/old", hours_old=30)
    world.file("handoff/new", hours_old=20)
    assert sorted(world.reaper.sweep()) == ["handoff/old", "losses/t:loss:0", "stability/s/op:0"]


def test_what_is_being_written_has_a_day(world: World) -> None:
    unfinished = world.blobs.root / ".unfinished"
    for name, hours_old in (("old", 25), ("new", 23)):
        (unfinished / name).write_bytes(b"half")
        os.utime(unfinished / name, ((NOW - timedelta(hours=hours_old)).timestamp(),) * 2)
    world.reaper.sweep()
    assert [file.name for file in unfinished.iterdir()] == ["new"]


def test_turns_go_after_a_day_with_their_files(world: World) -> None:
    for name, hours_old in (("old", 25), ("new", 23)):
        ref, at = world.file(f"turns/xx/{name}", hours_old), NOW - timedelta(hours=hours_old)
        about = {"request_id": name, "org_id": world.org, "name": "chat", "size_bytes": 1}
        world.add(tables.SessionTurn(ref=ref, created_at=at, **about))
    assert world.reaper.expire() == 0
    assert world.reaper.sweep() == ["turns/xx/old"]
    with world.database.read() as session:
        assert [turn.request_id for turn in session.query(tables.SessionTurn)] == ["new"]
