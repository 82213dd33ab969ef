"""The one place where an operation's result, its metering and what it made become lasting, in one transaction.

Called by the journal inside the database's writer, for all operations that end at the same moment. Settling one that
is already settled changes nothing and returns nothing, so a result that arrives twice is never billed twice. What was
held for an operation is released here and nowhere else, whether it succeeded or failed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import Connection, func, select, update
from sqlalchemy.orm import Session

from billing.metering import storage
from billing.metering.charges import Charge, Posting
from billing.money.accounts import READ, Found, Payer, wanted
from billing.prices import PriceList
from scheduler.journal.ending.outcomes import JSON, result_ref, text_of
from scheduler.journal.ending.references import in_use
from scheduler.journal.rows import TRAIN_KINDS, body_of
from scheduler.journal.samples.versions import row_of
from scheduler.links.messages import MUTATING, Done, OpKind
from scheduler.order.operations import SAMPLE, Operation, Outcome
from scheduler.order.plans import Create, Load, NewSampler, Save, Source
from store import tables
from store.database import audit
from store.database.bulk import Question, among, ask, update_rows

PROTOBUF = "application/x-protobuf"

_SAVE_TYPES = {
    OpKind.SAVE_STATE: "save_weights",
    OpKind.SAVE_SAMPLER: "save_weights_for_sampler",
    OpKind.SAVE_EXTERNAL: "save_weights_external",
}
_SAMPLE_KINDS = ("prefill", "cached_prefill", "sample")


def result_of(op: Operation, done: Done) -> Outcome:
    """The outcome of `op` for its client, unless the database later refuses it (a name in use)."""
    if done.failure is not None:
        return Outcome(error=done.failure.message, category=done.failure.category)
    plan = op.plan
    if isinstance(plan, NewSampler):
        return _json({"sampling_session_id": plan.sampler_id, "type": _SAVE_TYPES[OpKind(op.kind)]})
    if isinstance(plan, Save):
        size = {"size_bytes": done.facts.get("size_bytes", 0)} if op.kind == OpKind.SAVE_EXTERNAL else {}
        return _json({"path": _path(op, plan), "type": _SAVE_TYPES[OpKind(op.kind)]} | size)
    if isinstance(plan, Create) and plan.source is None:
        return _json({"model_id": op.lane, "type": "create_model"})
    if (source := _source(op)) is not None:
        return _json({"path": source.path, "model_id": op.lane, "type": "load_weights"})
    return Outcome(done.payload, JSON if op.kind == OpKind.OPTIM_STEP else PROTOBUF)


_OP = tables.Operation.__table__.c
_ENDING = select(
    *(_OP.id, _OP.org_id, _OP.project_id, _OP.key_id, _OP.user_id, _OP.session_id, _OP.base_model),
    *(_OP.state, _OP.hold_nusd, _OP.accepted_at),
)
#: PostgreSQL returns its own time with the rows, so that all replicas use one clock; SQLite is used by one machine.
_TIME = {"postgresql": (func.clock_timestamp(),), "sqlite": ()}
_ROWS: Question = {
    dialect: _ENDING.add_columns(*_TIME[dialect]).where(one).with_for_update()
    for dialect, one in among(_OP.id, "ids").items()
}


class _Row(NamedTuple):
    """The columns that `_ROWS` selects of an operation."""

    id: str
    org_id: str
    project_id: str | None
    key_id: int | None
    user_id: str | None
    session_id: str
    base_model: str
    state: str
    hold_nusd: int
    accepted_at: datetime
    time: datetime | None = None

    @property
    def payer(self) -> Payer:
        return Payer(self.org_id, self.project_id, self.key_id)


@dataclass(frozen=True)
class Ending:
    """An operation that has ended with `result`, which is stored already. `run_id`: the run that a sample was drawn
    from."""

    op: Operation
    done: Done
    result: Outcome
    run_id: str | None


#: The outcome, and weights that nothing needs any more. None: the operation had ended before.
Settled = tuple[Outcome, list[str]] | None


class Settlement:
    """Settles operations at a price list. Run by `Database.write_batched`, under the locks of the organisations."""

    def __init__(self, prices: PriceList) -> None:
        self._prices = prices

    def settle(self, session: Session, endings: list[Ending]) -> list[Settled]:
        """Write how operations ended. An outcome differs from its operation's result if a name was taken meanwhile."""
        connection = session.connection()
        rows, accounts = _read(connection, [ending.op for ending in endings])
        told = [row.time for row in rows.values() if row.time is not None]
        now = max(told).astimezone(UTC) if told else datetime.now(UTC)
        changes: list[dict[str, Any]] = []
        charges: list[Charge] = []
        settled: list[Settled] = []
        for ending in endings:
            found = rows.pop(ending.op.id, None)
            if found is None or found.state != "queued":
                settled.append(None)
                continue
            freed: list[str] = []
            outcome = _end(session, ending, now, freed)
            changes.append(_change(ending, outcome, now))
            charges.append(_charge(found, ending, outcome))
            settled.append((outcome, freed))
        posting = Posting(session, charges, self._prices, now, accounts)
        if changes:
            update_rows(connection, tables.Operation, changes)
        posting.store()
        return settled


def _read(connection: Connection, ops: list[Operation]) -> tuple[dict[str, _Row], Found]:
    """Read the rows of the operations, and the accounts of those that can cost something."""
    paid = [op for op in ops if op.kind in TRAIN_KINDS or op.kind == SAMPLE]
    payers = {Payer(op.org_id, op.project_id, op.key_id) for op in paid}
    accounts = wanted(payers, {op.accepted_at for op in paid})
    ids = (_ROWS, {"ids": sorted({op.id for op in ops})})
    rows, *found = ask(connection, ids, (READ, accounts)) if paid else ask(connection, ids)
    return {row[0]: _Row(*row) for row in rows}, Found(accounts, found[0] if found else [])


def _end(session: Session, ending: Ending, now: datetime, freed: list[str]) -> Outcome:
    refusal = _make(session, ending.op, ending.done, now, freed) if ending.result.error is None else None
    return Outcome(error=refusal, category="user") if refusal else ending.result


def _change(ending: Ending, outcome: Outcome, now: datetime) -> dict[str, Any]:
    """The changes to the row of an ended operation."""
    op = ending.op
    failed = outcome.error is not None
    text = text_of(outcome)
    return {
        "id": op.id,
        "state": "failed" if failed else "done",
        "error": outcome.error[:4096] if outcome.error is not None else None,
        "error_category": outcome.category if failed else None,
        "body": body_of(op) if op.kind in MUTATING and not failed else None,  # a lost run is rebuilt from these
        "result": text,
        "result_ref": None if failed or text is not None else result_ref(op.id),
        "result_type": outcome.content_type,
        "result_bytes": None if failed else len(outcome.payload),
        "finished_at": now,
        "timings": op.timings.row(op.accepted_at, datetime.now(UTC)),
        "policy": None if failed else row_of(ending.done),
    }


def _charge(row: _Row, ending: Ending, outcome: Outcome) -> Charge:
    return Charge(
        payer=row.payer,
        session_id=row.session_id,
        run_id=ending.run_id,
        operation_id=row.id,
        base_model=row.base_model,
        accepted_at=row.accepted_at,
        quantities=_quantities(ending) if outcome.error is None or _ran(ending) else {},
        hold_nusd=row.hold_nusd,
        user_id=row.user_id,
    )


def _ran(ending: Ending) -> bool:
    """True if the operation was computed and then failed by its user's fault."""
    return ending.done.failure is not None and ending.done.failure.ran


def _quantities(ending: Ending) -> dict[str, int]:
    facts, kind = ending.done.facts, ending.op.kind
    if kind in TRAIN_KINDS:
        return {TRAIN_KINDS[OpKind(kind)]: facts.get("tokens", 0)}
    return {name: facts.get(name, 0) for name in _SAMPLE_KINDS} if kind == SAMPLE else {}


def _make(session: Session, op: Operation, done: Done, now: datetime, freed: list[str]) -> str | None:
    """Write what `op` made (checkpoint, sampler, run) to the database. Returns the reason if that is refused."""
    if isinstance(op.plan, NewSampler):
        _new_sampler(session, op, op.plan, done, now)
    elif isinstance(op.plan, Save):
        return _new_checkpoint(session, op, op.plan, done, now, freed)
    elif (source := _source(op)) is not None:
        _note(session, op, "checkpoint_read", source.path, now, purpose="training")
    return None


def _source(op: Operation) -> Source | None:
    return op.plan.source if isinstance(op.plan, Create | Load) else None


def _path(op: Operation, plan: Save) -> str:
    return f"tinker://{op.lane}/{plan.kind}/{plan.name}"


def _json(result: dict[str, Any]) -> Outcome:
    return Outcome(json.dumps(result).encode(), JSON)


def _new_checkpoint(
    session: Session, op: Operation, plan: Save, done: Done, now: datetime, freed: list[str]
) -> str | None:
    """Add a named save. The name is checked here, in order with all other saves of the run. Returns the reason if it is
    refused."""
    kind, name = plan.kind, plan.name
    query = select(tables.Checkpoint).filter_by(run_id=op.lane, kind=kind, name=name)
    row = session.scalars(query).one_or_none()
    expired = row is not None and row.expires_at is not None and row.expires_at <= now
    if row is not None and not expired and not plan.overwrite:
        freed.append(op.target_ref)
        return f"a checkpoint named {kind}/{name} exists already: choose another name"
    if row is None:
        row = tables.Checkpoint(id=op.id, org_id=op.org_id, run_id=op.lane, kind=kind, name=name, public=False)
        session.add(row)
    else:
        storage.end(session, [row], now)
    older, row.ref = row.ref, op.target_ref
    row.public = False
    row.size_bytes = done.facts.get("size_bytes", 0)
    row.user_metadata = plan.user_metadata
    row.created_at = now
    row.expires_at = now + timedelta(seconds=plan.ttl_seconds) if plan.ttl_seconds else None
    if older and not in_use(session, older):
        freed.append(older)
    session.flush()
    storage.begin(session, row, now)
    _note(session, op, "checkpoint_created", _path(op, plan), now, size_bytes=row.size_bytes, overwritten=bool(older))
    return None


def _note(session: Session, op: Operation, event: str, path: str, now: datetime, **detail: Any) -> None:
    """Write to the audit log, as an action of the session's maker."""
    key_id = session.scalar(select(tables.Session.key_id).where(tables.Session.id == op.session_id))
    detail |= {"model_id": op.lane, "base_model": op.base_model, "session_id": op.session_id}
    audit.record(session, org_id=op.org_id, key_id=key_id, event=event, target=path, detail=detail, at=now)


def _new_sampler(session: Session, op: Operation, plan: NewSampler, done: Done, now: datetime) -> None:
    """Add an unnamed save: a sampler on the weights just written. An inflight one also moves the run's other inflight
    samplers."""
    kind = "inflight" if plan.inflight else "snapshot"
    if plan.inflight:
        siblings = tables.Sampler.run_id == op.lane, tables.Sampler.kind == kind
        older = session.scalars(select(tables.Sampler.adapter_ref).where(*siblings).distinct()).all()
        session.execute(update(tables.Sampler).where(*siblings).values(adapter_ref=op.target_ref))
        storage.end_samplers(session, older, now)
    storage.begin_sampler(session, op.target_ref, op.lane, done.facts.get("size_bytes", 0), now)
    session.add(
        tables.Sampler(
            id=plan.sampler_id,
            org_id=op.org_id,
            session_id=op.session_id,
            sampling_session_seq_id=plan.number,
            base_model=op.base_model,
            model_path=None,
            adapter_ref=op.target_ref,
            run_id=op.lane,
            kind=kind,
            created_at=now,
        )
    )
    session.flush()
