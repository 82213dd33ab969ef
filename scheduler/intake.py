"""Durable acceptance: from a new operation to its body, its row and its request id, exactly once.

(lane, seq) names one operation for ever. While one is being accepted or is unfinished it is known in memory, so that
arrivals at the same moment are one; afterwards its row in the database knows it.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from scheduler.messages import OpKind
from scheduler.operations import NewOperation, Operation, SequenceReused
from store import tables
from store.blobs import Blobs
from store.db import Database

#: A larger body is written by a thread, so that the event loop goes on.
SMALL_BODY_BYTES = 1 << 18

_SAVES = (OpKind.SAVE_STATE, OpKind.SAVE_SAMPLER, OpKind.SAVE_EXTERNAL)


@dataclass
class _Entry:
    """What is known of one (lane, seq) from the moment it is being accepted."""

    id: str
    kind: str
    body_sha256: str
    durable: asyncio.Future[None] | None = None  # None: it is

    def check(self, new: NewOperation) -> None:
        """Raise SequenceReused unless `new` is this operation again."""
        if self.kind != new.kind or self.body_sha256 != _digest(new):
            raise SequenceReused(
                f"operation {new.seq} of {new.lane} was already submitted as {self.kind} with another body: "
                "use the next sequence number"
            )


class Intake:
    def __init__(self, database: Database, blobs: Blobs) -> None:
        self._database = database
        self._blobs = blobs
        self._entries: dict[tuple[str, int], _Entry] = {}

    async def known(self, new: NewOperation, *, maybe_stored: bool) -> str | None:
        """The request id of `new` if it was accepted before (waiting until it is durable). The database is asked only
        if `maybe_stored`. Raises SequenceReused."""
        entry = self._entries.get((new.lane, new.seq))
        if entry is None and maybe_stored:
            entry = self._stored(new.lane, new.seq)
        if entry is None:
            return None
        entry.check(new)
        if entry.durable is not None:
            await asyncio.shield(entry.durable)
        return entry.id

    async def take(self, new: NewOperation, rows: tuple[tables.Base, ...]) -> Operation:
        """Make `new` and `rows` durable in one commit. Not known before: the caller has asked."""
        entry = _Entry(uuid.uuid4().hex, new.kind, _digest(new), asyncio.get_running_loop().create_future())
        assert entry.durable is not None
        self._entries[new.lane, new.seq] = entry
        op = _operation(new, entry.id)
        row = _row(op, entry.body_sha256)
        if new.refused is not None:
            row.state, row.error, row.error_category, row.finished_at = "failed", new.refused, "user", op.accepted_at
        try:
            await self._write(op.body_ref, new.body, [*rows, row])
        except BaseException as error:
            self.forget(op)
            entry.durable.set_exception(error)
            entry.durable.exception()  # seen, even when nobody else waits for it
            raise
        entry.durable.set_result(None)
        return op

    def forget(self, op: Operation) -> None:
        """`op` has ended: its row is enough."""
        self._entries.pop((op.lane, op.seq), None)

    def _stored(self, lane: str, seq: int) -> _Entry | None:
        with self._database.read() as session:
            row = session.scalars(select(tables.Operation).filter_by(lane=lane, seq=seq)).one_or_none()
        return _Entry(row.id, row.kind, row.body_sha256) if row is not None else None

    async def _write(self, body_ref: str, body: bytes, rows: list[tables.Base]) -> None:
        if body_ref and len(body) > SMALL_BODY_BYTES:
            await asyncio.to_thread(self._blobs.put, body_ref, body)
        elif body_ref:
            self._blobs.put(body_ref, body)

        def insert(session: Session) -> None:
            for row in rows:
                session.add(row)
                session.flush()

        await self._database.write(insert)


def _digest(new: NewOperation) -> str:
    return hashlib.sha256(new.body if new.sent is None else new.sent).hexdigest()


def _operation(new: NewOperation, request_id: str) -> Operation:
    plan = dict(new.plan)
    if new.kind in _SAVES:
        plan["target_ref"] = f"weights/{request_id}"
    return Operation(
        id=request_id,
        org_id=new.org_id,
        session_id=new.session_id,
        lane=new.lane,
        seq=new.seq,
        kind=new.kind,
        base_model=new.base_model,
        tokens=new.tokens,
        body_ref=f"ops/{request_id[:2]}/{request_id}" if new.body and new.refused is None else "",
        plan=plan,
        accepted_at=datetime.now(UTC),
        body_bytes=len(new.body),
    )


def _row(op: Operation, digest: str) -> tables.Operation:
    return tables.Operation(
        id=op.id,
        org_id=op.org_id,
        session_id=op.session_id,
        lane=op.lane,
        seq=op.seq,
        kind=str(op.kind),
        base_model=op.base_model,
        state="queued",
        tokens=op.tokens,
        body_ref=op.body_ref,
        body_sha256=digest,
        plan=op.plan,
        accepted_at=op.accepted_at,
    )
