"""Which files are still needed. Weight folders are shared: a checkpoint, its copies, and their samplers name one
folder, so nobody may delete a folder before asking here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Select, exists, or_, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from scheduler.journal.rows import source_ref
from scheduler.links.messages import MUTATING, SAVES
from store import tables
from store.database.caller import unrestricted

_SAVING = sorted(kind.value for kind in SAVES)
_REPLAYED = sorted(kind.value for kind in MUTATING)


def in_use(session: Session, ref: str) -> bool:
    """Whether anything in the database, pending changes included, needs the folder `ref`."""
    session.flush()
    with unrestricted(session):  # copies of other organisations share folders
        return any(
            session.scalars(query.where(column == ref.removeprefix(before)).limit(1)).first()
            for before, column, query in _queries()
            if ref.startswith(before)
        )


def all_in_use(session: Session) -> set[str]:
    """Every folder that something needs."""
    return {before + name for before, _, query in _queries() for name in session.scalars(query.distinct())}


def needed_files(session: Session) -> set[str]:
    """All blobs that are needed for every run to go on and every answer to be fetched; a backup must hold them."""
    op, run = tables.Operation, tables.Run
    saving = select(op.id).where(op.kind.in_(_SAVING), op.state == "queued")
    target = {f"weights/{op_id}" for op_id in session.scalars(saving)}  # may not be written yet
    live = run.state == "live", run.broken.is_(None)
    rebuilt = select(op.body_ref).join(run, run.id == op.lane).where(*live, op.state == "done", op.kind.in_(_REPLAYED))
    since = or_(run.snapshot_seq.is_(None), op.seq > run.snapshot_seq)
    queries: tuple[Select[Any], ...] = (
        select(run.snapshot_ref).where(*live, run.snapshot_ref.is_not(None)),
        select(op.body_ref).where(op.state == "queued"),
        rebuilt.where(since),
        select(op.result_ref).where(op.result_bytes.is_not(None), op.result_ref.is_not(None)),
        select(tables.SessionTurn.ref),
    )
    files = {ref for query in queries for ref in session.scalars(query)}
    return (files | all_in_use(session)) - target - {""}


def _queries() -> Iterator[tuple[str, InstrumentedAttribute[str] | Any, Select[Any]]]:
    """For each use of folders: the prefix of its refs, the column that names a folder, and the query for all needed
    ones."""
    checkpoint = tables.Checkpoint.ref
    yield "", checkpoint, select(checkpoint)
    sampler = tables.Sampler.adapter_ref
    active = select(sampler).join(tables.Session, tables.Session.id == tables.Sampler.session_id)
    yield "", sampler, active.where(tables.Session.state == "active")
    waits = exists().where(tables.Operation.lane == tables.Sampler.id, tables.Operation.state == "queued")
    yield "", sampler, select(sampler).where(waits)  # a look-up for each sampler, not a scan of all queued
    # A live run would be rebuilt from what it was loaded from, until its first snapshot.
    loaded = select(source_ref).join(tables.Run, tables.Run.id == tables.Operation.lane)
    live = (tables.LOADS, source_ref.is_not(None), tables.Run.state == "live")
    yield "", source_ref, loaded.where(*live)
    # What a trainer writes before the checkpoint's row is there.
    saving = tables.Operation.id
    target = select(saving).where(tables.Operation.kind.in_(_SAVING), tables.Operation.state == "queued")
    yield "weights/", saving, target  # as `scheduler.order.operations` says


def broken_because(session: Session, run_id: str, reason: str) -> str:
    """The error text of a broken run: why it is broken, and which checkpoint is left of it."""
    checkpoint = tables.Checkpoint
    saved = select(checkpoint.name).where(checkpoint.run_id == run_id, checkpoint.kind == "weights")
    with unrestricted(session):
        name = session.scalar(saved.order_by(checkpoint.created_at.desc()).limit(1))
    if name is None:
        return nothing_left(run_id, reason, "It has no checkpoint: start it again")
    path = f"tinker://{run_id}/weights/{name}"
    how = f"Go on from its last checkpoint, {path}, in a new run (create_training_client_from_state_with_optimizer)"
    return nothing_left(run_id, reason, how)


def nothing_left(run_id: str, reason: str, remedy: str = "Go on from its last checkpoint, if it has one") -> str:
    """The error text of a broken run whose checkpoints are not known."""
    return f"run {run_id} cannot be rebuilt as it was and does nothing more: {reason}. {remedy}"[:4096]
