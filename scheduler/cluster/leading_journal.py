"""The runs' part of the journal, on the replica that leads: what any replica has accepted comes in here."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from billing.prices import PriceList
from scheduler.cluster.fence import Fenced, Superseded
from scheduler.journal.ending.meters import Meters
from scheduler.journal.ending.outcomes import Answers
from scheduler.journal.ending.recording import DatabaseRecorder, Ended, Recorder
from scheduler.journal.recovery import recover_run, recover_runs
from scheduler.journal.rows import from_row, unpack
from scheduler.journal.samples.samplers import Samplers
from scheduler.journal.storing import Storing
from scheduler.journal.training import Training
from scheduler.journal.weights import expected_costs_of
from scheduler.links.messages import Done
from scheduler.order.light_work import SizesOf, unknown_sizes
from scheduler.order.operations import Operation, Waiting
from store import tables
from store.blobs.contract import Blobs
from store.blobs.room import Room


class FencedRecorder:
    """Records nothing any more once another process leads: that one does."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    async def record(self, op: Operation, done: Done) -> Ended | None:
        with suppress(Superseded):
            return await self._recorder.record(op, done)
        return None


class LeadingJournal:
    """`announce` tells all replicas that an operation has ended."""

    def __init__(
        self,
        database: Fenced,
        blobs: Blobs,
        prices: PriceList,
        meters: Meters,
        announce: Callable[[Operation], Coroutine[Any, Any, None]],
        sizes: SizesOf = unknown_sizes,
    ) -> None:
        room = Room(blobs.root)
        self._database, self._meters, self._announce = database, meters, announce
        self._storing = Storing(database, blobs, room)
        recorder = DatabaseRecorder(database, blobs, prices, room, Answers(database, blobs), Samplers(database))
        weight = expected_costs_of(database).weight
        self.training = Training(database, blobs, self._storing, FencedRecorder(recorder), weight, self._ended, sizes)

    def recover(self) -> None:
        """Take up the runs that the one before has left."""
        recover_runs(self.training, self._database, self.training.enqueue)

    async def stop(self, within_s: float) -> None:
        """Nothing happens here any more, after what is being stored is, or cannot be for now: the next leader does it
        again."""
        self.training.stop()
        await self._storing.stop(within_s)

    def hear(self, packed: bytes) -> bool:
        """An operation that some replica has accepted and packed. False: it has to be looked up."""
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

    def take_in(self, row: tables.Operation) -> Operation | None:
        """An operation that some replica has accepted. Returned when its run can do nothing more."""
        training = self.training
        lane = training.runs.get(row.lane)
        if training.opened(row.id) is not None or (lane is not None and lane.spent(row.seq)):
            return None
        if lane is None:
            with self._database.read() as session:
                run = session.get(tables.Run, row.lane)
                if run is not None and run.state == "live":
                    recover_run(training, session, run, training.enqueue)
                    return None
            return from_row(row) if row.state == "queued" else None
        if row.state == "queued":
            training.enqueue(from_row(row))
        else:
            training.skip(row.lane, row.seq)
        return None

    def waiting(self, op_id: str) -> Waiting | None:
        """What an operation waits for, if it is here."""
        op = self.training.opened(op_id)
        return self.training.waiting(op) if op is not None else None

    def gaps(self) -> list[tuple[str, int]]:
        """The numbers that runs wait for: (run, number)."""
        return [(lane.run_id, lane.next_seq) for lane in self.training.runs.values() if not lane.idle]

    def _ended(self, op: Operation) -> None:
        self._meters.closed(op, datetime.now(UTC))
        op.end()
        self._storing.in_background(self._announce(op))
