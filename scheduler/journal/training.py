"""The runs in the hands of this process: the units that trainers may take, and how operations end.

In the embedded service these are all runs; with several replicas the leader has them (`scheduler.cluster.term`). The
trainer's desk takes work out of `queue` and brings answers back through `finish`. Lives in one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Protocol

from sqlalchemy import Update, update

from scheduler.journal.ending.recording import DatabaseRecorder
from scheduler.journal.front import WORK_WAITS
from scheduler.journal.gaps import Gaps
from scheduler.journal.setbacks import Setbacks
from scheduler.journal.storing import Storing
from scheduler.links.messages import (
    MUTATING,
    NEVER_CAME,
    SAVES,
    Done,
    Failure,
    FailureTold,
    OpKind,
    PolicyMoved,
    Snapshot,
    TrainOp,
)
from scheduler.order.fair import FairTree
from scheduler.order.lanes import RunLane, Unit
from scheduler.order.light_work import SizesOf, cost_of
from scheduler.order.operations import Operation, Waiting
from scheduler.order.plans import Create, NewSampler
from scheduler.order.presence import Present, queued_for
from store import tables
from store.blobs.contract import Blobs
from store.database.db import Transactions

#: How many forgotten runs are remembered.
MOST_FORGOTTEN = 10_000


class Desk(Protocol):
    """The desk that workers come to for work (`scheduler.dispatch`)."""

    worker: str

    def presence(self, base_model: str) -> Present:
        """Which workers are present, as far as they have told."""

    def wake(self) -> None: ...

    def cancel(self, op: Operation) -> None: ...

    def policy_moved(self, moved: PolicyMoved) -> None: ...


class Training:
    """`weight` gives an organisation's fair share, `sizes` the sizes of a run's parameters; `ended` is called with
    every operation that has its outcome."""

    def __init__(
        self,
        database: Transactions,
        blobs: Blobs,
        storing: Storing,
        recorder: DatabaseRecorder,
        weight: Callable[[str], int],
        ended: Callable[[Operation], None],
        sizes: SizesOf,
    ) -> None:
        self.queue: FairTree[Unit] = FairTree()
        self.runs: dict[str, RunLane] = {}
        self.released: list[str] = []  # runs that trainers may forget
        # forgotten lately: rows read before that are out of date
        self.forgotten: deque[str] = deque(maxlen=MOST_FORGOTTEN)
        self.changed: set[str] = set()  # runs whose queues have changed, other than by trainers taking units
        self.desks: list[Desk] = []  # woken when there is work, and told when a policy moves
        self.versions: dict[str, int] = {}  # by run: its optimizer steps
        self._storing, self._recorder = storing, recorder
        self._weight, self._ended, self.sizes = weight, ended, sizes
        self._open: dict[str, Operation] = {}
        self._waking = False
        self._moved_by: dict[str, int] = {}  # by run: the latest operation that told of its version
        self._last_save: dict[str, asyncio.Task[Any]] = {}  # by run: its latest save that is being settled
        self.setbacks = Setbacks(self, storing, database, blobs)
        self.gaps = Gaps(storing, self.skip, lambda op, why: self._fail(op, why, "user"))

    def opened(self, op_id: str) -> Operation | None:
        """The operation of this id; None if this journal does not hold it, or it has ended."""
        return self._open.get(op_id)

    # ---- queueing

    def enqueue(self, op: Operation) -> None:
        self._open[op.id] = op
        lane = self.runs.get(op.lane)
        if lane is None:
            if not isinstance(op.plan, Create):  # closed while the operation was made durable
                self._fail(op, f"run {op.lane} was closed before this operation reached it", "user")
                return
            lane = self.runs[op.lane] = RunLane(op.org_id, op.plan.spec, priority=op.plan.priority)
        if lane.broken:
            self._fail(op, lane.broken, lane.broken_category)
            return
        units = lane.arrive(op)
        if lane.is_past(op):  # at start-up: later operations, to be replayed, are queued already
            self.rebuild(lane)
        else:
            self.queue_units(lane, units)
        self.gaps.watch(lane)
        self.wake_soon()

    def skip(self, op: Operation, why: str | None) -> None:
        """The operation has ended already: later ones need not wait for its number. `why` it failed, if it did."""
        lane = self.runs.get(op.lane)
        if lane is not None:
            if why is not None:
                lane.failed(op.seq, op.kind, why)
            if op.kind == NEVER_CAME:
                lane.gradients.over(op.seq, op.accepted_at)  # its client never got an answer
            self.queue_units(lane, lane.refuse(op.seq))
            self.wake_soon()

    def told(self, failure: FailureTold) -> None:
        """The client knows of this failure from now on."""
        lane = self.runs.get(failure.run_id)
        if lane is not None:
            lane.gradients.over(failure.seq, failure.at)

    def queue_units(self, lane: RunLane, units: list[Unit]) -> None:
        sizes = self.sizes(lane.spec) if units else None
        for unit in units:
            self.queue.push(lane.path, unit, cost_of(unit, lane.spec, sizes), weight=self._weight(lane.org_id))
        self.changed.add(lane.run_id)

    def unqueue(self, lane: RunLane) -> None:
        """Take all units of a run out of the queue."""
        self.queue.remove(lane.path)
        self.changed.add(lane.run_id)

    def rebuild(self, lane: RunLane) -> None:
        """The trainer that held this run is gone: queue the units that rebuild it, and then those that were not
        answered."""
        self.unqueue(lane)
        self.queue_units(lane, lane.lost())

    def message_of(self, unit: Unit) -> TrainOp:
        """The message to a trainer for this unit."""
        lane = self.runs.get(unit.send.run_id)
        return lane.sent(unit) if lane is not None else unit.send

    def wake(self) -> None:
        for desk in self.desks:
            desk.wake()

    def wake_soon(self) -> None:
        """Wake the desks once for all operations of this turn of the event loop, so that they are handed out
        together."""
        if not self._waking:
            self._waking = True
            asyncio.get_running_loop().call_soon(self._wake_once)

    def _wake_once(self) -> None:
        self._waking = False
        self.wake()

    def waiting(self, op: Operation) -> Waiting:
        """What `op` waits for, and its place in the queue."""
        begun = under_way(op)
        if begun is not None:
            return begun
        lane = self.runs.get(op.lane)
        missing = lane.missing(op) if lane else None
        if missing is not None:
            return Waiting("active", f"waiting for operation {missing} of this run, which has not arrived")
        if lane is not None and lane.paused:
            return Waiting("active", f"the run waits: {lane.paused}; it is tried again")
        ahead = self.queue.ahead(lane.path, lambda item: _computes(item, op)) if lane is not None else 0
        return in_line(self.desks, "trainer", ahead, op.base_model)

    # ---- finishing

    def finish(self, done: Done) -> None:
        """A trainer's answer, or the reason why there is none: settle it, then wake whoever waits."""
        op = self._open.get(done.op_id)
        if op is None or op.settling:
            return
        op.settling, now = True, datetime.now(UTC)
        op.timings.done(now)
        if done.failure is not None and (lane := self.runs.get(op.lane)) is not None:
            lane.failed(op.seq, op.kind, done.failure.message)
        saves = op.kind in SAVES
        before = self._last_save.get(op.lane) if saves else None
        settling = self._settle(op, done) if before is None else self._settle_after(before, op, done)
        task = self._storing.in_background(settling)
        if saves:
            self._last_save[op.lane] = task
            task.add_done_callback(lambda ended: self._saved(op.lane, ended))

    async def _settle_after(self, before: asyncio.Task[Any], op: Operation, done: Done) -> None:
        """Saves of one run are settled in their order: the last one decides which checkpoint has a name, and which
        weights samplers follow."""
        await asyncio.wait({before})
        await self._settle(op, done)

    def _saved(self, run_id: str, ended: asyncio.Task[Any]) -> None:
        if self._last_save.get(run_id) is ended:
            del self._last_save[run_id]

    def _fail(self, op: Operation, message: str, category: str) -> None:
        self.finish(Done(op_id=op.id, failure=Failure(message, category)))

    async def _settle(self, op: Operation, done: Done) -> None:
        ended = await self._recorder.record(op, done)
        if ended is None:
            return
        op.outcome = ended.outcome
        lane = self.runs.get(op.lane)
        if ended.unrecorded and lane is not None and op.kind in MUTATING and done.failure is None:
            why = f"operation {op.seq} was computed and cannot be recorded ({ended.unrecorded})"
            self.setbacks.break_run(lane, why)
        self._close(op, ended.freed)
        if op.outcome.error is None and "version" in done.facts:
            self._moved(op, done.facts["version"])

    def _moved(self, op: Operation, version: int) -> None:
        """The run's policy has a new version, or its inflight samplers have new weights."""
        if op.seq < self._moved_by.get(op.lane, 0):
            return  # settled late: a later operation has already moved the policy further
        self.versions[op.lane], self._moved_by[op.lane] = version, op.seq
        moved = PolicyMoved(op.lane, version, op.target_ref if moves_samplers(op) else "", op.seq)
        for desk in self.desks:
            desk.policy_moved(moved)

    def _close(self, op: Operation, freed: list[str]) -> None:
        assert op.outcome is not None
        ok = op.outcome.error is None
        self._open.pop(op.id, None)
        lane = self.runs.get(op.lane)
        if lane is not None:
            parked = lane.missing(op) is not None
            lane.answered(op, ok)
            if parked:  # its number is spent: later ones need not wait for it
                self.queue_units(lane, lane.refuse(op.seq))
            if op.kind == OpKind.CREATE and not ok:
                self.close_for_good(lane, f"run {op.lane} was never created: {op.outcome.error}", "user")
            if lane.closing and lane.idle:
                self._forget(lane)
        if not (ok and op.kind in MUTATING):
            self._storing.drop_body(op)
        for ref in freed:
            self._storing.delete_tree(ref)
        self._ended(op)

    def note_attempts(self, op: Operation) -> None:
        """Write down how many trainers were lost over `op`, also when that is reset: a restarted server must know."""
        statement = update(tables.Operation).where(tables.Operation.id == op.id).values(attempts=op.attempts)
        self._storing.in_background(self._storing.write(statement))

    async def snapshot(self, taken: Snapshot) -> None:
        """A trainer has written a run's whole state: the bodies of operations up to there, and the older snapshot, are
        deleted."""
        lane = self.runs.get(taken.run_id)
        if lane is None:
            self._storing.delete_tree(taken.ref)
            return
        older = lane.snapshot
        await self._storing.flush()
        if lane.broken is not None:
            return
        part = {"op": taken.part_op, "stop": taken.part_stop} if taken.part_op else None
        values = {"snapshot_seq": taken.seq, "snapshot_ref": taken.ref, "snapshot_part": part}
        await self._storing.write(update(tables.Run).where(tables.Run.id == taken.run_id).values(values))
        for op in lane.saved(taken.seq, taken.ref, taken.part_op, taken.part_stop):
            self._storing.drop_body(op)
        if older is not None and older.ref != taken.ref:
            self._storing.delete_tree(older.ref)

    async def flush(self) -> None:
        """Wait until every result handed in so far is settled."""
        await self._storing.flush()

    def stop(self) -> None:
        """Stop what happens by itself: resumed runs and watched gaps."""
        self.setbacks.stop()
        self.gaps.stop()

    # ---- the end of runs

    def close_for_good(self, lane: RunLane, why: str, category: str) -> None:
        """The run does nothing more, and trainers may forget it: all unanswered operations fail with `why`."""
        lane.broken, lane.broken_category = why, category
        self.released.append(lane.run_id)
        self.unqueue(lane)
        for op in lane.abandon():
            self._fail(op, why, category)

    def close_run(self, run_id: str) -> None:
        """The run's session has ended: let queued work finish, or fail it once it has waited for WORK_WAITS, then
        forget the run."""
        lane = self.runs.get(run_id)
        if lane is None:
            return
        now = asyncio.get_running_loop().time()  # a clock that nobody can set
        lane.closing_since = now if lane.closing_since is None else lane.closing_since
        left = [op for op in self._open.values() if op.lane == run_id]
        for op in left:
            if lane.missing(op) is not None:
                self._fail(op, f"the session ended before operation {lane.next_seq} of run {run_id} arrived", "user")
        over = now - lane.closing_since >= WORK_WAITS.total_seconds()
        if over and left and not any(op.running or op.settling for op in left):
            hours = f"{WORK_WAITS.total_seconds() / 3600:.0f} hours"
            why = f"no trainer with {lane.spec.base_model} took it within {hours}, and its session has ended"
            self.close_for_good(lane, f"{why}: it was given up, and is not billed", "server")
        elif lane.idle:
            self._forget(lane)

    def _forget(self, lane: RunLane) -> None:
        self.runs.pop(lane.run_id, None)
        self.versions.pop(lane.run_id, None)
        self._moved_by.pop(lane.run_id, None)
        self.released.append(lane.run_id)
        self.forgotten.append(lane.run_id)
        self._storing.in_background(self._close_lastingly(lane))

    async def _close_lastingly(self, lane: RunLane) -> None:
        """Close the run's row, then delete its files. In this order, because a former leader cannot write the row, and
        does not know which files the new leader still needs."""
        await self._storing.write(_closed(lane.run_id))
        for op in lane.saved(lane.next_seq, ""):
            self._storing.drop_body(op)
        self._storing.delete_tree(f"runs/{lane.run_id}")


def under_way(op: Operation) -> Waiting | None:
    """What the client is told of an operation that has left the queue; None for one that is queued."""
    if op.timings.computed is not None:
        return Waiting("active", op.stuck or "computed; its result is being stored")
    return Waiting("active", "running") if op.running else None


def in_line(desks: list[Desk], worker: str, ahead: int, base_model: str) -> Waiting:
    """What the client is told of an operation of `base_model` that is queued for a `worker` of these desks."""
    its = (desk.presence(base_model) for desk in desks if desk.worker == worker)
    return queued_for(worker, ahead, base_model, next(its, Present(here=True, serves=True)))


def moves_samplers(op: Operation) -> bool:
    """Whether `op` moves the inflight samplers of its run to the weights that it saves."""
    return isinstance(op.plan, NewSampler) and op.plan.inflight


def _computes(unit: Unit, op: Operation) -> bool:
    return unit.op is op and not unit.send.replay


def _closed(run_id: str) -> Update:
    return update(tables.Run).where(tables.Run.id == run_id).values(state="closed")
