"""Start-up: take up where the last process stopped, from what is durable.

Live runs come back with the log that rebuilds them, and everything accepted but unfinished is queued again. A run whose
session ended meanwhile finishes what was accepted and is then forgotten.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from scheduler.journal.journal import Journal
from scheduler.journal.rows import from_row, plan_of
from scheduler.journal.samples.versions import policy_of
from scheduler.journal.training import Training
from scheduler.links.messages import MUTATING, NEVER_CAME, OpKind, PolicyMoved, RunSpec, Snapshot
from scheduler.order.lanes import RunLane, came_at, uses_gradients
from scheduler.order.operations import INTERACTIVE, SAMPLE, Operation
from scheduler.order.plans import Create
from store import tables
from store.database.db import Database


def recover(journal: Journal, database: Database) -> None:
    """Fill a fresh journal. Call once, in its event loop, before any worker attaches."""
    with database.read() as session:
        for run in session.scalars(select(tables.Run).filter_by(state="live")):
            take_up(journal.training, log_of(session, run), journal.enqueue)
        unfinished = select(tables.Operation).filter_by(state="queued")
        for row in session.scalars(unfinished.order_by(tables.Operation.accepted_at)):
            if row.kind == SAMPLE:
                journal.recover(from_row(row))
            elif journal.training.opened(row.id) is None:  # not taken up: its run was closed when it came
                journal.enqueue(from_row(row))


#: The columns of a run that make its spec.
OF_SPEC = ("base_model", "rank", "alpha", "seed", "train_attn", "train_mlp", "train_unembed", "optimizer")


@dataclass(frozen=True)
class RunLog:
    """A run as the database has it: its operations in order, whether its session has ended, and its policy."""

    run: tables.Run
    rows: Sequence[tables.Operation]
    over: bool
    policy: PolicyMoved


def log_of(session: Session, run: tables.Run) -> RunLog:
    query = select(tables.Operation).filter(tables.Operation.lane == run.id, tables.Operation.kind != SAMPLE)
    rows = session.scalars(query.order_by(tables.Operation.seq)).all()
    over = session.get_one(tables.Session, run.session_id).state != "active"
    return RunLog(run, rows, over, policy_of(session, run.id, run.session_id))


def take_up(training: Training, log: RunLog, enqueue: Callable[[Operation], None]) -> None:
    """Take up a run that is not in hand; runs in the event loop. `enqueue` queues an operation that another process
    accepted."""
    run, rows, policy = log.run, log.rows, log.policy
    ended = {row.seq for row in rows if row.state != "queued"}
    next_seq = next(seq for seq in itertools.count() if seq not in ended)
    snapshot = snapshot_of(run)
    created = next((plan_of(row) for row in rows if row.kind == OpKind.CREATE), None)
    priority = created.priority if isinstance(created, Create) else INTERACTIVE
    lane = RunLane(run.org_id, spec_of(run), next_seq=next_seq, snapshot=snapshot, priority=priority)
    lane.broken, lane.broken_category = run.broken, "server"
    lane.closing_since = asyncio.get_running_loop().time() if log.over else None
    training.runs[run.id] = lane
    training.versions[run.id] = policy.version
    for desk in training.desks:
        desk.policy_moved(policy)
    for seq in ended:
        lane.refuse(seq)
    for row in rows:
        _note(lane, row)
        if row.state == "failed" and row.kind == OpKind.CREATE:
            lane.broken, lane.broken_category = f"run {run.id} was never created: {row.error}", "user"
        elif row.state == "done" and row.kind in MUTATING and (snapshot is None or row.seq > snapshot.seq):
            lane.remember(from_row(row))
    if lane.broken is None and (missing := training.setbacks.missing_for(lane)):
        training.setbacks.break_run(lane, missing)
    for row in rows:
        if row.state == "queued":  # all earlier operations are known by now
            enqueue(from_row(row))
    if lane.closing:
        training.close_run(run.id)


def _note(lane: RunLane, row: tables.Operation) -> None:
    """Tell the lane what its next step must know of an ended operation."""
    if row.state == "queued":
        return
    if row.kind == OpKind.FORWARD_BACKWARD:
        lane.gradients.came(row.seq, came_at(plan_of(row), row.accepted_at))
    if row.error is not None:
        lane.failed(row.seq, row.kind, row.error)
    known_at = row.finished_at if row.error is None or row.kind == NEVER_CAME else row.fetched_at
    if known_at is not None:
        lane.gradients.over(row.seq, known_at)
    if uses_gradients(row.kind, row.error):
        lane.gradients.used(row.seq)


def snapshot_of(run: tables.Run) -> Snapshot | None:
    if run.snapshot_seq is None:
        return None
    part = run.snapshot_part or {}
    return Snapshot(run.id, run.snapshot_seq, run.snapshot_ref or "", part.get("op", ""), part.get("stop", 0))


def spec_of(run: tables.Run) -> RunSpec:
    return RunSpec(run.id, **{name: getattr(run, name) for name in OF_SPEC})
