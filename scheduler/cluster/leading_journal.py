"""The runs' part of the journal, on the replica that leads: what any replica has accepted comes in here."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from sqlalchemy.orm import Session

from billing.prices import PriceList
from scheduler.cluster.fence import Superseded
from scheduler.journal.journal import Journal
from scheduler.journal.recovery import recover_run
from scheduler.journal.rows import from_row
from scheduler.links.messages import Done
from scheduler.order.operations import Operation, Waiting
from store import tables
from store.blobs import Blobs
from store.db import Database


class LeadingJournal(Journal):
    """`announce` tells all replicas that an operation has ended."""

    def __init__(
        self,
        database: Database,
        blobs: Blobs,
        prices: PriceList,
        announce: Callable[[Operation], Coroutine[Any, Any, None]],
    ) -> None:
        super().__init__(database, blobs, prices, max_queued_per_org=2**31, max_queued_bytes_per_org=2**62)
        self._announce = announce

    def waiting(self, op_id: str) -> Waiting | None:
        """What an operation waits for, if it is here."""
        op = self._open.get(op_id)
        return self._waiting(op) if op is not None else None

    def take_in(self, session: Session, row: tables.Operation) -> Operation | None:
        """An operation that some replica has accepted. Returned when its run can do nothing more."""
        lane = self.runs.get(row.lane)
        if row.id in self._open or (lane is not None and lane.spent(row.seq)):
            return None
        if lane is None:
            run = session.get(tables.Run, row.lane)
            if run is not None and run.state == "live":
                recover_run(self, session, run)
                return None
            return from_row(row) if row.state == "queued" else None
        if row.state == "queued":
            self.enqueue(from_row(row))
        else:
            self.queue_units(lane, lane.refuse(row.seq))
            self.wake()
        return None

    def gaps(self) -> list[tuple[str, int]]:
        """The numbers that runs wait for: (run, number)."""
        return [(lane.run_id, lane.next_seq) for lane in self.runs.values() if not lane.idle]

    async def _settle(self, op: Operation, done: Done) -> None:
        with suppress(Superseded):  # the one that leads now will
            await super()._settle(op, done)

    def _close(self, op: Operation, freed: list[str]) -> None:
        super()._close(op, freed)
        self.in_background(self._announce(op))
