"""The runs' part of the journal, on the replica that leads: it takes in the operations of runs that any replica has
accepted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select

from billing.prices import PriceList
from scheduler.cluster.fence import Fenced
from scheduler.journal.ending.meters import Meters
from scheduler.journal.ending.outcomes import Answers
from scheduler.journal.ending.recording import DatabaseRecorder
from scheduler.journal.recovery import RunLog, log_of, take_up
from scheduler.journal.rows import from_row, unpack
from scheduler.journal.samples.samplers import Samplers
from scheduler.journal.storing import Storing
from scheduler.journal.training import Training
from scheduler.order.light_work import SizesOf
from scheduler.order.operations import Operation, Waiting
from store import tables
from store.blobs.contract import Blobs
from store.blobs.room import Room

#: How many runs a new leader takes up before it lets other work of its event loop run.
TAKEN_UP_AT_ONCE = 32


class LeadingJournal:
    """`announce` tells all replicas that an operation has ended; `failed` hears what work in the background raises."""

    def __init__(
        self,
        database: Fenced,
        blobs: Blobs,
        prices: PriceList,
        meters: Meters,
        announce: Callable[[Operation], Coroutine[Any, Any, None]],
        sizes: SizesOf,
        failed: Callable[[BaseException], None],
    ) -> None:
        room = Room(blobs.root)
        self._database, self._meters, self._announce = database, meters, announce
        self._storing = Storing(database, blobs, room, failed)
        answers, samplers = Answers(database, blobs), Samplers(database)
        recorder = DatabaseRecorder(database, blobs, prices, room, answers, samplers)
        self._weights: dict[str, int] = {}  # by organisation with live runs: its fair share
        self.training = Training(database, blobs, self._storing, recorder, self._weight, self._ended, sizes)

    def _weight(self, org_id: str) -> int:
        return self._weights.get(org_id, 1)

    def reweigh(self) -> None:
        """Read the fair shares of organisations; blocks, so it runs in a thread. The event loop uses them and may not
        wait for the database."""
        run, org = tables.Run, tables.Organisation
        theirs = select(org.id, org.weight).join(run, run.org_id == org.id).where(run.state == "live").distinct()
        with self._database.read() as session:
            self._weights = {org_id: weight for org_id, weight in session.execute(theirs)}

    async def recover(self, run: Callable[..., Awaitable[Any]]) -> None:
        """Take up the runs that the last leader left, some at a time. `run` runs blocking calls in a thread."""
        live = await run(self._live)
        for start in range(0, len(live), TAKEN_UP_AT_ONCE):
            logs: dict[str, RunLog] = await run(self.logs_of, live[start : start + TAKEN_UP_AT_ONCE])
            for log in logs.values():
                take_up(self.training, log, self.training.enqueue)

    def _live(self) -> list[str]:
        with self._database.read() as session:
            return list(session.scalars(select(tables.Run.id).where(tables.Run.state == "live")))

    async def stop(self, within_s: float) -> None:
        """End this journal: wait until everything under way is stored, at most `within_s`. What is not stored then, the
        next leader does again."""
        self.training.stop()
        await self._storing.stop(within_s)

    def hear(self, packed: bytes) -> bool:
        """Take in an operation that a replica has accepted and packed. Returns False if it has to be read from the
        database."""
        try:
            op = unpack(packed)
        except ValueError:
            return False
        lane = self.training.runs.get(op.lane)
        if lane is None:
            return False
        if self.training.opened(op.id) is None and not lane.spent(op.seq):
            self.training.enqueue(op)
        return True

    def logs_of(self, run_ids: Iterable[str]) -> dict[str, RunLog]:
        """The logs of those runs that are live; blocks, so it runs in a thread."""
        self.reweigh()
        with self._database.read() as session:
            found = (session.get(tables.Run, run_id) for run_id in run_ids)
            return {run.id: log_of(session, run) for run in found if run is not None and run.state == "live"}

    def take_in(self, row: tables.Operation, logs: Mapping[str, RunLog]) -> Operation | None:
        """Take in an operation that a replica has accepted, from its row. `logs` has the logs of runs that were not in
        hand when the rows were read; such a run may have begun and ended since. Returns the operation if its run can do
        nothing more."""
        training = self.training
        lane = training.runs.get(row.lane)
        if training.opened(row.id) is not None or (lane is not None and lane.spent(row.seq)):
            return None
        if lane is None and row.lane in logs and row.lane not in training.forgotten:
            take_up(training, logs[row.lane], training.enqueue)
            return None
        if lane is None:
            return from_row(row) if row.state == "queued" else None
        if row.state == "queued":
            training.enqueue(from_row(row))
        else:
            training.skip(from_row(row), row.error)
        return None

    def waiting(self, op_id: str) -> Waiting | None:
        """What an operation waits for; None if this journal does not hold the operation."""
        op = self.training.opened(op_id)
        return self.training.waiting(op) if op is not None else None

    def gaps(self) -> list[tuple[str, int]]:
        """The (run, sequence number) that each run with parked operations waits for."""
        return [(lane.run_id, lane.next_seq) for lane in self.training.runs.values() if not lane.idle]

    def _ended(self, op: Operation) -> None:
        self._meters.closed(op, datetime.now(UTC))
        op.end()
        self._storing.in_background(self._announce(op))
