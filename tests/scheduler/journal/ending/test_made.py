"""What operations leave in the database when they end: their row, the checkpoint or sampler that they made, entries in
the audit log, and charges."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import update

from billing.prices import KINDS, load_prices
from scheduler.journal.accepting.acceptance import Taking, insert_all
from scheduler.journal.ending import settlement
from scheduler.journal.ending.outcomes import JSON
from scheduler.journal.ending.settlement import PROTOBUF, Ending, Settlement, result_of
from scheduler.links.messages import Done, Failure, OpKind, RunSpec
from scheduler.order.operations import SAMPLE, Operation, Outcome
from scheduler.order.plans import BODY_ONLY, Create, Load, NewSampler, Plan, Save, Source
from store import tables
from store.database.db import Database
from tests.rows import in_batch, run_row, session_row

NOW = datetime.now(UTC)
TICK = timedelta(microseconds=1)
#: A token costs a nano-dollar.
PRICES = load_prices([{"version": "n", "effective_from": NOW.replace(year=2020), "storage_uusd_per_gb_month": 1,
                       "models": {"*": dict.fromkeys(KINDS, 1000)}}])  # fmt: skip
SOURCE = Source("weights/old", "tinker://other/weights/one", True)
SPEC = RunSpec("run", "m", 8, 32.0, 0, True, True, True)
SAVED = Save("weights", "one")


class Desk:
    """Ends operations of the run `run`, all requested with key 7 of ann in the project p."""

    def __init__(self, database: Database) -> None:
        self.database, self.seq = database, 0
        database.write_now(self._open)

    @staticmethod
    def _open(session: Any) -> None:
        session.add(tables.Organisation(id="a", name="a", created_at=NOW))
        session.flush()
        for name, key_id in (("other", 4), ("s", 3), ("t", 5)):
            session.add(session_row("a", NOW, name, key_id=key_id))
        session.flush()
        session.add_all([run_row("a", NOW, id, of) for id, of in (("other", "other"), ("run", "s"), ("then", "t"))])

    def end(
        self, kind: str, plan: Plan = BODY_ONLY, name: str = "", *, failure: Failure | None = None, **facts: int
    ) -> tuple[Outcome, list[str]]:
        self.seq += 1
        op = Operation(name or f"op{self.seq}", "a", "s", "run", self.seq, kind, "m", 100, "", plan, NOW)
        row = {
            "id": op.id, "org_id": "a", "session_id": "s", "key_id": 7, "user_id": "ann", "project_id": "p",
            "lane": "run", "seq": op.seq, "kind": kind, "base_model": "m", "state": "queued", "tokens": 100,
            "hold_nusd": 0, "body_ref": "", "body_sha256": "", "plan": {}, "accepted_at": NOW,
        }  # fmt: skip
        in_batch(self.database, insert_all, Taking(row), lock="a")
        done = Done(op.id, b"payload", facts, failure)
        ending = Ending(op, done, result_of(op, done), "run")
        settled = in_batch(self.database, Settlement(PRICES).settle, ending, lock="a")
        assert settled is not None
        outcome: tuple[Outcome, list[str]] = settled
        return outcome

    def rows(self, table: type[Any], **those: Any) -> list[Any]:
        with self.database.read() as session:
            return list(session.query(table).filter_by(**those).order_by(table.id))

    def change(self, table: type[Any], **values: Any) -> None:
        self.database.write_now(lambda session: session.execute(update(table).values(**values)))

    def noted(self) -> list[tuple[str, str, dict[str, Any]]]:
        """The entries of the audit log, each under the key that made the session."""
        rows = self.rows(tables.AuditEntry)
        assert {row.key_id for row in rows} <= {3}
        about = {"model_id": "run", "base_model": "m", "session_id": "s"}
        assert all(about.items() <= row.detail.items() for row in rows)
        return [(row.event, row.target, {k: v for k, v in row.detail.items() if k not in about}) for row in rows]

    def stored(self) -> list[tuple[str, int, bool]]:
        """What is metered as stored: (of what, bytes, whether it has ended)."""
        rows = self.rows(tables.StorageSpan)
        return sorted((row.checkpoint_id, row.size_bytes, row.ended_at is not None) for row in rows)


@pytest.fixture
def desk(database: Database) -> Desk:
    return Desk(database)


@pytest.mark.parametrize(
    ("kind", "plan", "told"),
    [
        (OpKind.CREATE, Create(SPEC, "batch"), {"model_id": "run", "type": "create_model"}),
        (
            OpKind.CREATE,
            Create(SPEC, "batch", SOURCE),
            {"path": SOURCE.path, "model_id": "run", "type": "load_weights"},
        ),
        (OpKind.LOAD_STATE, Load(SOURCE), {"path": SOURCE.path, "model_id": "run", "type": "load_weights"}),
        (OpKind.SAVE_STATE, SAVED, {"path": "tinker://run/weights/one", "type": "save_weights"}),
        (
            OpKind.SAVE_SAMPLER,
            Save("sampler_weights", "x"),
            {"path": "tinker://run/sampler_weights/x", "type": "save_weights_for_sampler"},
        ),
        (
            "save_external",  # as the database returns it
            Save("external_weights", "x"),
            {"path": "tinker://run/external_weights/x", "type": "save_weights_external", "size_bytes": 9},
        ),
        (
            OpKind.SAVE_SAMPLER,
            NewSampler("s:sample:4", 4, False),
            {"sampling_session_id": "s:sample:4", "type": "save_weights_for_sampler"},
        ),
    ],
)
def test_what_clients_are_told_of_what_was_made(kind: str, plan: Plan, told: dict[str, Any]) -> None:
    op = Operation("op", "a", "s", "run", 1, kind, "m", 0, "", plan, NOW)
    outcome = result_of(op, Done("op", b"", {"size_bytes": 9}))
    assert (json.loads(outcome.payload), outcome.content_type, outcome.error) == (told, JSON, None)
    if "size_bytes" in told:
        assert json.loads(result_of(op, Done("op", b"", {})).payload)["size_bytes"] == 0
    failed = result_of(op, Done("op", b"", {}, Failure("no disk", "server")))
    assert (failed.payload, failed.error, failed.category) == (b"", "no disk", "server")


@pytest.mark.parametrize(
    ("kind", "type"), [("optim_step", JSON), (OpKind.OPTIM_STEP, JSON), (OpKind.FORWARD, PROTOBUF), (SAMPLE, PROTOBUF)]
)
def test_what_was_computed_is_passed_on_as_it_came(kind: str, type: str) -> None:
    op = Operation("op", "a", "s", "run", 1, kind, "m", 0, "", BODY_ONLY, NOW)
    assert result_of(op, Done("op", b"computed", {})) == Outcome(b"computed", type)


def test_a_checkpoint_is_what_its_save_said(desk: Desk) -> None:
    plan = Save("weights", "one", ttl_seconds=60, user_metadata={"note": "x"})
    outcome, freed = desk.end(OpKind.SAVE_STATE, plan, "first", size_bytes=9)
    assert (outcome.error, freed) == (None, [])
    [row] = desk.rows(tables.Checkpoint)
    assert (row.id, row.org_id, row.run_id, row.kind, row.name) == ("first", "a", "run", "weights", "one")
    assert (row.ref, row.size_bytes, row.public, row.user_metadata) == ("weights/first", 9, False, {"note": "x"})
    assert row.expires_at == row.created_at + timedelta(seconds=60)
    assert desk.noted() == [("checkpoint_created", "tinker://run/weights/one", {"size_bytes": 9, "overwritten": False})]
    assert desk.stored() == [("first", 9, False)]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_name_is_taken_until_it_is_given_up(desk: Desk, overwrite: bool) -> None:
    desk.end(OpKind.SAVE_STATE, SAVED, "first", size_bytes=9)
    desk.change(tables.Checkpoint, public=True)
    for other in (Save("sampler_weights", "one"), Save("weights", "two")):  # another kind, another name
        assert desk.end(OpKind.SAVE_STATE, other)[0].error is None
    outcome, freed = desk.end(OpKind.SAVE_STATE, Save("weights", "one", overwrite=overwrite), "second", size_bytes=5)
    [row] = desk.rows(tables.Checkpoint, kind="weights", name="one")
    assert (row.id, row.expires_at) == ("first", None)
    if overwrite:
        assert (outcome.error, freed) == (None, ["weights/first"])
        assert (row.ref, row.size_bytes, row.public) == ("weights/second", 5, False)
        assert desk.noted()[-1][2] == {"size_bytes": 5, "overwritten": True}
        assert [span for span in desk.stored() if span[0] == "first"] == [("first", 5, False), ("first", 9, True)]
        return
    assert (outcome.error, outcome.category) == (
        "a checkpoint named weights/one exists already: choose another name",
        "user",
    )
    assert freed == ["weights/second"]
    assert (row.ref, row.size_bytes, row.public) == ("weights/first", 9, True)
    assert [op.state for op in desk.rows(tables.Operation, id="second")] == ["failed"]
    assert len(desk.noted()) == 3


@pytest.mark.parametrize(("after", "free"), [(-TICK, True), (TICK * 0, True), (TICK, False)])
def test_a_name_that_has_expired_is_free(
    desk: Desk, after: timedelta, free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return NOW

    monkeypatch.setattr(settlement, "datetime", Clock)
    desk.end(OpKind.SAVE_STATE, SAVED, "first")
    [row] = desk.rows(tables.Checkpoint)
    assert (row.size_bytes, row.created_at) == (0, NOW)
    desk.change(tables.Checkpoint, expires_at=NOW + after)
    outcome, freed = desk.end(OpKind.SAVE_STATE, SAVED, "second")
    assert (outcome.error is None, freed) == (free, ["weights/first" if free else "weights/second"])


def test_weights_that_a_copy_still_names_stay(desk: Desk) -> None:
    desk.end(OpKind.SAVE_STATE, SAVED, "first")

    def copy(session: Any) -> None:
        usual = {"size_bytes": 0, "public": False, "user_metadata": {}, "created_at": NOW}
        row = tables.Checkpoint(id="copy", org_id="a", run_id="other", kind="weights", name="c", **usual)
        row.ref = "weights/first"
        session.add(row)

    desk.database.write_now(copy)
    assert desk.end(OpKind.SAVE_STATE, Save("weights", "one", overwrite=True), "second") == (
        desk_outcome("tinker://run/weights/one"),
        [],
    )


def desk_outcome(path: str) -> Outcome:
    return Outcome(json.dumps({"path": path, "type": "save_weights"}).encode(), JSON)


def test_samplers_that_follow_a_run_move_and_others_stay(desk: Desk) -> None:
    def save(number: int, inflight: bool, name: str) -> None:
        desk.end(OpKind.SAVE_SAMPLER, NewSampler(f"s:sample:{number}", number, inflight), name, size_bytes=number)

    def elsewhere(session: Any) -> None:
        """Other rows: of runs that sort before and after, and of a kind that sorts before `inflight`."""
        usual = {"org_id": "a", "sampling_session_seq_id": 0, "base_model": "m", "created_at": NOW}
        for id, run_id, kind in (("a", "run", "base"), ("theirs", "other", "inflight"), ("then", "then", "inflight")):
            row = tables.Sampler(id=id, session_id="other", run_id=run_id, kind=kind, **usual)
            row.adapter_ref = f"weights/{id}"
            session.add(row)

    desk.database.write_now(elsewhere)
    save(1, False, "kept")
    save(2, True, "before")
    save(3, True, "after")
    save(4, False, "last")
    samplers = [(row.id, row.kind, row.adapter_ref) for row in desk.rows(tables.Sampler)]
    assert samplers == [
        ("a", "base", "weights/a"),
        ("s:sample:1", "snapshot", "weights/kept"),
        ("s:sample:2", "inflight", "weights/after"),
        ("s:sample:3", "inflight", "weights/after"),
        ("s:sample:4", "snapshot", "weights/last"),
        ("theirs", "inflight", "weights/theirs"),
        ("then", "inflight", "weights/then"),
    ]
    assert desk.stored() == [("after", 3, False), ("before", 2, True), ("kept", 1, False), ("last", 4, False)]
    [one] = desk.rows(tables.Sampler, id="s:sample:2")
    assert (one.org_id, one.session_id, one.sampling_session_seq_id, one.run_id) == ("a", "s", 2, "run")
    assert (one.base_model, one.model_path) == ("m", None)
    assert desk.noted() == []
    desk.end(OpKind.SAVE_SAMPLER, NewSampler("s:sample:5", 5, False), "unknown")
    assert ("unknown", 0, False) in desk.stored()


@pytest.mark.parametrize("plan", [Load(SOURCE), Create(SPEC, "batch", SOURCE)])
def test_weights_that_were_read_are_logged(desk: Desk, plan: Plan) -> None:
    desk.end(OpKind.LOAD_STATE, plan, failure=Failure("no disk", "server"))
    assert desk.noted() == []
    desk.end(OpKind.LOAD_STATE, plan)
    desk.end(OpKind.CREATE, Create(SPEC, "batch"))
    assert desk.noted() == [("checkpoint_read", SOURCE.path, {"purpose": "training"})]


def test_the_row_of_what_succeeded_and_of_what_failed(desk: Desk) -> None:
    desk.end(OpKind.OPTIM_STEP, name="done", version=6)
    desk.end(OpKind.OPTIM_STEP, name="failed", failure=Failure("x" * 5000, "user"), version=7)
    done, failed = (desk.rows(tables.Operation, id=name)[0] for name in ("done", "failed"))
    assert (done.state, done.error, done.error_category) == ("done", None, None)
    assert (done.result_type, done.result_bytes, done.policy) == (JSON, len(b"payload"), {"version": 6})
    assert (done.result, done.result_ref, done.finished_at >= NOW) == ("payload", None, True)
    assert (failed.state, failed.error, failed.error_category) == ("failed", "x" * 4096, "user")
    assert (failed.result, failed.result_ref, failed.result_bytes, failed.policy) == (None, None, None, None)


TRAINED, SAMPLED = {"tokens": 5}, {"prefill": 1, "cached_prefill": 2, "sample": 3}
MISTAKE = Failure("not finite", "user")


@pytest.mark.parametrize(
    ("kind", "facts", "failure", "charged"),
    [
        (OpKind.FORWARD_BACKWARD, TRAINED, None, {"train": 5}),
        (OpKind.FORWARD, TRAINED, None, {"prefill": 5}),
        (OpKind.OPTIM_STEP, {**TRAINED, **SAMPLED}, None, {}),
        (OpKind.SAVE_STATE, {**TRAINED, **SAMPLED}, None, {}),
        (OpKind.FORWARD, {}, None, {}),
        (SAMPLE, SAMPLED, None, SAMPLED),
        ("-sample"[1:], {"sample": 3}, None, {"sample": 3}),
        (OpKind.FORWARD_BACKWARD, TRAINED, MISTAKE, {}),
        (OpKind.FORWARD_BACKWARD, TRAINED, Failure("not finite", "user", ran=True), {"train": 5}),
        (SAMPLE, SAMPLED, Failure("not finite", "user", ran=True), SAMPLED),
        (OpKind.FORWARD_BACKWARD, TRAINED, Failure("the disk is gone", "server"), {}),
    ],
)
def test_what_is_charged(
    desk: Desk, kind: str, facts: dict[str, int], failure: Failure | None, charged: dict[str, int]
) -> None:
    """Computed work is charged even if it then failed by the user's fault; all else only if it succeeded."""
    desk.end(kind, failure=failure, **facts)
    events = desk.rows(tables.UsageEvent)
    assert {event.kind: event.quantity for event in events} == charged
    payers = {(e.org_id, e.project_id, e.key_id, e.user_id, e.session_id, e.run_id, e.base_model) for e in events}
    assert payers <= {("a", "p", 7, "ann", "s", "run", "m")}


def test_what_ends_together_is_settled_each_by_itself(desk: Desk) -> None:
    """A batch that contains an unknown operation and a repeat."""
    ops = [Operation(name, "a", "s", "run", n, "forward", "m", 9, "", BODY_ONLY, NOW) for n, name in enumerate("abc")]

    def accept(op: Operation) -> None:
        row = {
            "id": op.id, "org_id": "a", "session_id": "s", "key_id": None, "user_id": None, "project_id": None,
            "lane": "run", "seq": op.seq, "kind": op.kind, "base_model": "m", "state": "queued", "tokens": 9,
            "hold_nusd": 9, "body_ref": "", "body_sha256": "", "plan": {}, "accepted_at": NOW,
        }  # fmt: skip
        in_batch(desk.database, insert_all, Taking(row), lock="a")

    for op in (ops[0], ops[2]):
        accept(op)
    endings = []
    for op in (ops[1], ops[0], ops[0], ops[2]):
        done = Done(op.id, b"", {"tokens": 4})
        endings.append(Ending(op, done, result_of(op, done), "run"))
    settled = desk.database.write_now(lambda session: Settlement(PRICES).settle(session, endings))
    assert [each is None for each in settled] == [True, False, True, False]
    assert sorted((event.operation_id, event.quantity) for event in desk.rows(tables.UsageEvent)) == [
        ("a", 4),
        ("c", 4),
    ]
    with desk.database.read() as session:
        wallet = session.get_one(tables.Wallet, "a")
        assert (wallet.balance_nusd, wallet.held_nusd) == (-8, 0)
