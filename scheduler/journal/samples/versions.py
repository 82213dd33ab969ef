"""Versions of a run's policy in the database: how far it is, for a process that takes over runs;
and which one an operation drew from or made, for the health of the run."""

from __future__ import annotations

from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from scheduler.journal.rows import plan_of
from scheduler.links.messages import Done, OpKind, PolicyMoved
from scheduler.order.plans import Create, Load
from store import tables

_row = tables.Operation
_BEGINS = (OpKind.CREATE, OpKind.LOAD_STATE)


def row_of(done: Done) -> dict[str, Any] | None:
    """For the operation's row: {"drawn": [{version: tokens}, one for each sequence]} for a sample; {"version"}, the
    policy's version after the operation, for steps, loads and saves."""
    if done.drawn:
        return {"drawn": [{str(version): n for version, n in sequence.items()} for sequence in done.drawn]}
    return {"version": done.facts["version"]} if "version" in done.facts else None


def policy_of(session: Session, run_id: str, session_id: str) -> PolicyMoved:
    """The version of a run of this session, and the weights that its inflight samplers are on ("" for none)."""
    last = session.scalar(select(func.max(_row.seq)).where(_row.lane == run_id, _row.state == "done"))
    sampler = tables.Sampler
    follows = (sampler.session_id == session_id, sampler.run_id == run_id, sampler.kind == "inflight")
    newest = select(sampler.adapter_ref).where(*follows).limit(1)
    seq = last if last is not None else -1
    return PolicyMoved(run_id, version_at(session, run_id, seq), session.scalar(newest) or "", seq)


def version_at(session: Session, run_id: str, seq: int) -> int:
    """The optimizer steps behind a run's weights right after operation `seq`: those since it was created or loaded and,
    where its optimizer came from a checkpoint, those of the checkpoint. 0 if that is not known."""
    done = (_row.lane == run_id, _row.state == "done")
    begins = select(_row).where(*done, _row.seq <= seq, _row.kind.in_(_BEGINS)).order_by(_row.seq.desc()).limit(1)
    begin = session.scalars(begins).one_or_none()
    if begin is None:
        return 0
    since = (_row.seq > begin.seq, _row.seq <= seq, _row.kind == OpKind.OPTIM_STEP)
    steps = session.scalar(select(func.count()).select_from(_row).where(*done, *since)) or 0
    plan = plan_of(begin)
    source = plan.source if isinstance(plan, Create | Load) else None
    if source is None or not source.with_optimizer:
        return steps
    saved = session.get(_row, source.ref.removeprefix("weights/"))
    return steps + (version_at(session, saved.lane, saved.seq) if saved is not None else 0)
