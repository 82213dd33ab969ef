"""Operations as the database has them, for a replica: other replicas accept and settle them, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import and_, func, or_, select

from scheduler.journal.front import WORK_WAITS
from scheduler.journal.rows import from_row
from scheduler.order.operations import SAMPLE, Operation
from store import tables
from store.database.bulk import among
from store.database.db import Database

#: How many operations one query asks for.
MOST_AT_ONCE = 500

#: The time at which a sample was accepted, and the sample's operation id.
QueuedSample = tuple[datetime, str]

_OP = tables.Operation.__table__
_QUEUED = {dialect: select(_OP).where(one, _OP.c.state == "queued") for dialect, one in among(_OP.c.id, "ids").items()}


class StoredOperations:
    """Each call blocks on the database: for threads."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def queued(self, op_id: str) -> Operation | None:
        """The operation of this id; None if it has ended."""
        with self._database.read() as session:
            row = session.get(tables.Operation, op_id)
        return from_row(row) if row is not None and row.state == "queued" else None

    def all_queued(self, op_ids: Sequence[str]) -> dict[str, Operation]:
        """The operations of these ids that have not ended, by id."""
        with self._database.ask() as connection:
            found: Iterable[Any] = connection.execute(_QUEUED[connection.dialect.name], {"ids": list(op_ids)})
            return {one.id: from_row(one) for one in found}  # plain rows, for there are many

    def queued_samples(self, after: QueuedSample | None, most: int) -> list[QueuedSample]:
        """Samples that have not ended, oldest first, beginning after sample `after` if it is given."""
        row = tables.Operation
        query = select(row.accepted_at, row.id).where(row.state == "queued", row.kind == SAMPLE)
        if after is not None:
            at, op_id = after
            query = query.where(or_(row.accepted_at > at, and_(row.accepted_at == at, row.id > op_id)))
        with self._database.read() as session:
            return [(at, op_id) for at, op_id in session.execute(query.order_by(row.accepted_at, row.id).limit(most))]

    def ended(self, op_ids: Sequence[str]) -> list[tables.Operation]:
        row, ended = tables.Operation, list[tables.Operation]()
        with self._database.read() as session:
            for start in range(0, len(op_ids), MOST_AT_ONCE):
                chosen = row.id.in_(op_ids[start : start + MOST_AT_ONCE])
                ended += session.scalars(select(row).where(chosen, row.state != "queued"))
        return ended

    def working_sessions(self) -> set[str]:
        row = tables.Operation
        recent = row.accepted_at > datetime.now(UTC) - WORK_WAITS
        with self._database.read() as session:
            return set(session.scalars(select(row.session_id).where(row.state == "queued", recent).distinct()))

    def lengths(self) -> dict[str, int]:
        with self._database.read() as session:
            queued = session.scalar(select(func.count()).where(tables.Operation.state == "queued")) or 0
            runs = session.scalar(select(func.count()).where(tables.Run.state == "live")) or 0
        return {"open": queued, "running": 0, "runs": runs}
