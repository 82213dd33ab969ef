"""The operation journal: what was accepted, in which order it may run, and how it ended.

Invariants: an accepted operation is durable before its request id is given out; (lane, seq) names one operation for
ever; an operation's result, its metering and its state become durable in one commit, and only then does anyone waiting
for it wake. The journal lives in one event loop. `api` calls accept and outcome, the desks (`scheduler.dispatch`)
take work out of `train_queue` and `sample_queue` and bring results back through `finish`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Protocol

from sqlalchemy import Update, update
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from billing.prices import PriceList
from scheduler.journal.acceptance import Intake
from scheduler.journal.backlog import Backlog
from scheduler.journal.completions import Completion, Completions, Target
from scheduler.journal.in_flight import InFlight
from scheduler.journal.meters import Meters
from scheduler.journal.outcomes import Answers, result_ref
from scheduler.journal.rows import from_row
from scheduler.journal.samplers import Samplers
from scheduler.journal.sampling import item_of
from scheduler.journal.setbacks import Setbacks
from scheduler.journal.settlement import Ending, Settled, Settlement, result_of
from scheduler.journal.storing import until_stored
from scheduler.links.messages import MUTATING, SAVES, Done, Failure, OpKind, PolicyMoved, Snapshot
from scheduler.order.expected_cost import Charges
from scheduler.order.fair import FairTree
from scheduler.order.lanes import RunLane, Unit
from scheduler.order.local_queue import LocalQueue
from scheduler.order.operations import (
    SAMPLE,
    Draining,
    Gone,
    NewOperation,
    Operation,
    Outcome,
    RunClosed,
    Waiting,
)
from scheduler.order.plans import Create, NewSampler
from store import tables
from store.blobs import Blobs
from store.db import Database
from store.room import NoRoom, Room

log = logging.getLogger(__name__)

#: Between two attempts to read what a sample samples from.
READ_AGAIN_S = 0.2


class Desk(Protocol):
    """Where workers come for work (`scheduler.dispatch`)."""

    worker: str

    @property
    def attached(self) -> bool: ...

    def wake(self) -> None: ...

    def cancel(self, op: Operation) -> None: ...

    def policy_moved(self, moved: PolicyMoved) -> None: ...


class Journal:
    def __init__(
        self,
        database: Database,
        blobs: Blobs,
        prices: PriceList,
        max_queued_per_org: int = 20_000,
        max_queued_bytes_per_org: int = 1 << 30,
        room: Room | None = None,
    ) -> None:
        self.train_queue: FairTree[Unit] = FairTree()
        self.sample_queue = LocalQueue(time.monotonic)
        self.runs: dict[str, RunLane] = {}
        self.released: list[str] = []  # runs that trainers may forget
        self.desks: list[Desk] = []
        self.completions = Completions()
        self.meters = Meters()
        self.in_flight = InFlight()
        self.draining = False
        self._database = database
        self._blobs = blobs
        self._settlement = Settlement(prices)
        self._backlog = Backlog(max_queued_per_org, max_queued_bytes_per_org)
        self.answers = Answers(database, blobs)
        self._charges = Charges(self._weight, time.monotonic)
        self._intake = Intake(database, blobs, prices)
        self._open: dict[str, Operation] = {}
        self.samplers = Samplers(database)
        self.versions: dict[str, int] = {}  # optimizer steps of runs
        self._moved_by: dict[str, int] = {}  # the latest operation that told of them
        self._settling: set[asyncio.Task[Any]] = set()
        self._last_save: dict[str, asyncio.Task[Any]] = {}  # the latest save of a run that is being settled
        self._room = room or Room(blobs.root)
        self.setbacks = Setbacks(self, database, blobs)

    # ---- accepting

    async def accept(self, new: NewOperation, *rows: tables.Base) -> str:
        """Make `new` (and `rows`) durable, queue it, and return its request id. A repeat returns the first id.

        Raises SequenceReused, QueueFull, Draining, NoRoom, RunClosed, OutOfMoney."""
        try:
            lane = self.runs.get(new.lane)
            request_id = await self._intake.known(new, maybe_stored=lane is None or lane.spent(new.seq))
            if request_id is None:
                op = await self._take(new, rows)
        except IntegrityError:  # somebody has accepted it: another replica just now, or this one without knowing it
            request_id = await self._intake.known(new, maybe_stored=True)
            if request_id is None:
                raise
        except (OSError, OperationalError, PoolTimeout) as error:
            raise NoRoom(self._room.refused(error)) from error
        if request_id is not None:
            self._adopt(request_id)
            return request_id
        self.meters.accepted(op)
        if new.refused is None:
            self._enqueue(op)
        else:
            self._backlog.release(op.org_id, op.body_bytes)
            self._refuse(op, new.refused)
        return op.id

    async def _take(self, new: NewOperation, rows: tuple[tables.Base, ...]) -> Operation:
        self._admit(new)
        try:
            return await self._intake.take(new, rows)
        except BaseException:
            self._backlog.release(new.org_id, len(new.body))
            raise

    def _adopt(self, request_id: str) -> None:
        """Queue an operation whose row was written although its client was told that it was not."""
        if request_id in self._open or self.answers.recent(request_id) is not None:
            return
        with self._database.read() as session:
            row = session.get(tables.Operation, request_id)
        if row is not None and row.state == "queued":
            self.enqueue(from_row(row))

    def _refuse(self, op: Operation, why: str) -> None:
        """The front turned it away: it ends at once, and what follows it need not wait for its number."""
        op.outcome = Outcome(error=why, category="user")
        op.finished.set()
        self.answers.remember(op)
        self._intake.forget(op)
        lane = self.runs.get(op.lane)
        if lane is not None:
            self.queue_units(lane, lane.refuse(op.seq))
            self.wake()

    def _admit(self, new: NewOperation) -> None:
        if self.draining:
            raise Draining("the server is restarting; it takes work again in a moment")
        self._room.check()
        lane = self.runs.get(new.lane)
        if new.kind not in (SAMPLE, OpKind.CREATE) and (lane is None or lane.closing):
            raise RunClosed(f"run {new.lane} is closed: its session has ended, or it is a copy of weights")
        self._backlog.take(new.org_id, len(new.body))

    def enqueue(self, op: Operation) -> None:
        """Queue an operation that an earlier process accepted."""
        self._backlog.add(op.org_id, op.body_bytes)
        self._enqueue(op)

    def _enqueue(self, op: Operation) -> None:
        self._open[op.id] = op
        self.in_flight.add(op)
        if op.kind == SAMPLE:
            self.queue_sample(op)
        else:
            lane = self.runs.get(op.lane)
            if lane is None:
                assert isinstance(op.plan, Create), f"operation {op.seq} of {op.lane}, which is not here"
                lane = self.runs[op.lane] = RunLane(op.org_id, op.plan.spec, priority=op.plan.priority)
            if lane.broken:
                self._fail(op, lane.broken, lane.broken_category)
                return
            self.queue_units(lane, lane.arrive(op))
        self.wake()

    def queue_units(self, lane: RunLane, units: list[Unit]) -> None:
        for unit in units:
            self.train_queue.push(lane.path, unit, unit.tokens, weight=self._charges.weight(lane.org_id))

    def queue_sample(self, op: Operation) -> None:
        try:
            sampler = self.samplers.facts(op.lane)
        except (
            OperationalError,
            PoolTimeout,
        ) as error:  # what was accepted is queued, as soon as the database is there
            log.warning("%s; again in %.1f s", self._room.refused(error), READ_AGAIN_S)
            self.in_background(self._queue_later(op))
            return
        op.charged = self._charges.expected(op)
        self.sample_queue.push(item_of(op, sampler, self._charges.weight(op.org_id)))

    async def _queue_later(self, op: Operation) -> None:
        await asyncio.sleep(READ_AGAIN_S)
        self.queue_sample(op)
        self.wake()

    def wake(self) -> None:
        for desk in self.desks:
            desk.wake()

    # ---- waiting

    async def outcome(self, org_id: str, request_id: str, timeout_s: float) -> Outcome | Waiting | Gone | None:
        """How an operation ended, waiting at most `timeout_s` for it; None when this organisation has no such one."""
        op = self._open.get(request_id) or self.answers.recent(request_id)
        if op is None:
            return self.answers.stored(org_id, request_id)
        if op.org_id != org_id:
            return None
        try:
            await asyncio.wait_for(op.finished.wait(), timeout_s)
        except TimeoutError:
            return self._waiting(op)
        return op.outcome

    def _waiting(self, op: Operation) -> Waiting:
        """What `op` waits for, and its place."""
        if op.timings.computed is not None:
            return Waiting("active", op.stuck or "computed; its result is being stored")
        if op.running:
            return Waiting("active", "running")
        lane = self.runs.get(op.lane)
        missing = lane.missing(op) if lane else None
        if missing is not None:
            return Waiting("active", f"waiting for operation {missing} of this run, which has not arrived")
        if lane is not None and lane.paused:
            return Waiting("active", f"the run waits: {lane.paused}; it is tried again")
        worker = "generator" if op.kind == SAMPLE else "trainer"
        if any(desk.worker == worker and not desk.attached for desk in self.desks):
            return Waiting("paused_capacity", f"waiting for the {worker}, which is starting; {self._place(op)}")
        return Waiting("active", f"waiting for the {worker}, which is busy; {self._place(op)}")

    def _place(self, op: Operation) -> str:
        ahead = 0
        if op.kind == SAMPLE:
            ahead = self.sample_queue.ahead(op.id) or 0
        elif (lane := self.runs.get(op.lane)) is not None:
            ahead = self.train_queue.ahead(lane.path, lambda item: item.op is op and not item.send.replay)
        return f"about {ahead} pieces of work are ahead of it in fair order" if ahead else "it is next"

    # ---- finishing

    def finish(self, done: Done) -> None:
        """A worker's answer: settle it, then wake who waits."""
        op = self._open.get(done.op_id)
        if op is None or op.settling:
            return
        op.settling = True
        op.timings.done(datetime.now(UTC))
        if op.kind == SAMPLE and done.failure is None:
            self.sample_queue.correct(op.path, self._charges.ended(op, done.facts))
        saves = op.kind in SAVES
        before = self._last_save.get(op.lane) if saves else None
        task = self.in_background(self._settle_after(before, op, done))
        if saves:
            self._last_save[op.lane] = task
            task.add_done_callback(lambda ended: self._saved(op.lane, ended))

    async def _settle_after(self, before: asyncio.Task[Any] | None, op: Operation, done: Done) -> None:
        """Saves of one run become lasting in their order: who has a name, and what samplers follow, is what the last
        one has made."""
        if before is not None:
            await asyncio.wait({before})
        await self._settle(op, done)

    def _saved(self, lane: str, ended: asyncio.Task[Any]) -> None:
        if self._last_save.get(lane) is ended:
            del self._last_save[lane]

    def in_background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)
        return task

    def _fail(self, op: Operation, message: str, category: str) -> None:
        self.finish(Done(op_id=op.id, failure=Failure(message, category)))

    async def _settle(self, op: Operation, done: Done) -> None:
        try:
            settled = await self._write_end(op, done, result_of(op, done))
            if settled is None:
                return
            op.outcome, freed = settled
        except Exception as error:
            log.exception("operation %s could not be settled", op.id)
            op.outcome, freed = Outcome(error="the server could not record the result; it is not billed"), []
            with suppress(Exception):  # what was held for it is released with its failure, now or after a restart
                await self._write_end(op, done, op.outcome)
            lane = self.runs.get(op.lane)
            if lane is not None and op.kind in MUTATING and done.failure is None:
                self.setbacks.break_run(
                    lane, f"operation {op.seq} was computed and cannot be recorded ({type(error).__name__})"
                )
        self._close(op, freed)
        if op.outcome.error is None and "version" in done.facts:
            self._moved(op, done.facts["version"])

    async def _write_end(self, op: Operation, done: Done, result: Outcome) -> Settled:
        """Store the result and settle, however often it takes: what was applied is never answered as failed."""
        tried = 0

        async def attempt() -> Settled:
            nonlocal tried
            tried += 1
            if result.error is None:  # stored before the commit that promises it
                self._blobs.put(result_ref(op.id), result.payload)
            ending = Ending(op, done, result, self.samplers.facts(op.lane).run_id if op.kind == SAMPLE else op.lane)
            settled: Settled = await self._database.write_batched(self._settlement.settle, ending, lock=op.org_id)
            return self._settled_before(op) if settled is None and tried > 1 else settled

        def refused(error: Exception, pause_s: float) -> None:
            what = self._room.refused(error)
            op.stuck = f"computed; {what}; it is tried again until it can be stored"
            log.warning("operation %s: %s; again in %.1f s", op.id, what, pause_s)

        return await until_stored(attempt, refused)

    async def write_surely(self, statement: Update) -> None:
        """Write, however often it takes."""

        def refused(error: Exception, pause_s: float) -> None:
            log.warning("%s; again in %.1f s", self._room.refused(error), pause_s)

        await until_stored(lambda: self._database.write(lambda session: session.execute(statement)), refused)

    def _settled_before(self, op: Operation) -> Settled:
        stored = self.answers.stored(op.org_id, op.id)
        return (stored, []) if isinstance(stored, Outcome) else None

    def _moved(self, op: Operation, version: int) -> None:
        """The policy of a run has moved, or its inflight samplers have."""
        if op.seq < self._moved_by.get(op.lane, 0):
            return  # settled late: a later operation has moved it further
        self.versions[op.lane], self._moved_by[op.lane] = version, op.seq
        moved = PolicyMoved(op.lane, version, op.target_ref if _moves_samplers(op) else "", op.seq)
        for desk in self.desks:
            desk.policy_moved(moved)

    def _close(self, op: Operation, freed: list[str]) -> None:
        assert op.outcome is not None
        ok = op.outcome.error is None
        self.meters.closed(op, datetime.now(UTC))
        if self._open.pop(op.id, None) is not None:
            self.in_flight.remove(op)
        self._backlog.release(op.org_id, op.body_bytes)
        self.answers.remember(op)
        self._intake.forget(op)
        lane = self.runs.get(op.lane)
        if lane is not None:
            lane.answered(op, ok)
            if op.kind == OpKind.CREATE and not ok:
                self.close_for_good(lane, f"run {op.lane} was never created: {op.outcome.error}", "user")
            if lane.closing and lane.idle:
                self._forget(lane)
        if ok and _moves_samplers(op):
            self.samplers.moved(op.lane, op.target_ref)
        if not (ok and op.kind in MUTATING):
            self._drop_body(op)
        for ref in freed:
            self._delete(ref)
        op.finished.set()
        if op.kind == SAMPLE:
            target = Target.of(op.org_id, op.lane, op.seq)
            self.completions.publish(target, Completion(op.id, len(op.outcome.payload) if ok else None))

    def _drop_body(self, op: Operation) -> None:
        if op.body_ref:
            self._delete(op.body_ref, self._blobs.delete)

    def _delete(self, ref: str, delete: Callable[[str], None] | None = None) -> None:
        """What cannot be deleted for now is left to the reaper."""
        try:
            (delete or self._blobs.delete_tree)(ref)
        except OSError as error:
            log.warning("%s cannot be deleted: %s", ref, error)

    def rebuild(self, lane: RunLane) -> None:
        """The trainer that held this run is gone: queue what rebuilds the run, and all it had left to do."""
        self.train_queue.remove(lane.path)
        self.queue_units(lane, lane.lost())

    def close_for_good(self, lane: RunLane, why: str, category: str) -> None:
        """The run does nothing more: all that it had left to do fails with `why`."""
        lane.broken, lane.broken_category = why, category
        self.train_queue.remove(lane.path)
        for op in lane.abandon():
            self._fail(op, why, category)

    # ---- what desks need

    def opened(self, op_id: str) -> Operation | None:
        """An operation that has not ended."""
        return self._open.get(op_id)

    def _weight(self, org_id: str) -> int:
        try:
            with self._database.read() as session:
                row = session.get(tables.Organisation, org_id)
                return row.weight if row is not None else 1
        except OperationalError:  # what was accepted is queued, whether or not the database is there just now
            return 1

    async def snapshot(self, taken: Snapshot) -> None:
        """A trainer has written a run's whole state: bodies up to there and the older snapshot may go."""
        lane = self.runs.get(taken.run_id)
        if lane is None:
            self._delete(taken.ref)
            return
        older = lane.snapshot
        await self.flush()
        if lane.broken is not None:
            return
        part = {"op": taken.part_op, "stop": taken.part_stop} if taken.part_op else None
        values = {"snapshot_seq": taken.seq, "snapshot_ref": taken.ref, "snapshot_part": part}
        await self.write_surely(update(tables.Run).where(tables.Run.id == taken.run_id).values(values))
        for op in lane.saved(taken.seq, taken.ref, taken.part_op, taken.part_stop):
            self._drop_body(op)
        if older is not None and older.ref != taken.ref:
            self._delete(older.ref)

    async def flush(self) -> None:
        """Wait until every result handed in so far is settled."""
        if self._settling:
            await asyncio.wait(list(self._settling))

    async def stop(self, within_s: float) -> None:
        """`flush`, but not for ever: what still cannot be stored stays queued, and is done again after a restart."""
        self.setbacks.stop()
        if self._settling:
            await asyncio.wait(list(self._settling), timeout=within_s)
        for task in list(self._settling):
            task.cancel()

    def close_run(self, run_id: str) -> None:
        """Its session has ended: let queued work finish, then forget the run."""
        lane = self.runs.get(run_id)
        if lane is None:
            return
        lane.closing = True
        for op in [op for op in self._open.values() if op.lane == run_id and lane.missing(op) is not None]:
            self._fail(op, f"the session ended before operation {lane.next_seq} of run {run_id} arrived", "user")
        if lane.idle:
            self._forget(lane)

    def _forget(self, lane: RunLane) -> None:
        self.runs.pop(lane.run_id, None)
        self.versions.pop(lane.run_id, None)
        self._moved_by.pop(lane.run_id, None)
        self.released.append(lane.run_id)
        self.in_background(self.write_surely(_closed(lane.run_id)))
        for op in lane.saved(lane.next_seq, ""):
            self._drop_body(op)
        self._delete(f"runs/{lane.run_id}")

    def cancel(self, org_id: str, request_id: str) -> bool:
        """Stop a sample: one that waits ends at once and empty, one that runs ends with the tokens it has."""
        op = self._open.get(request_id)
        if op is None or op.org_id != org_id or op.kind != SAMPLE:
            return False
        for desk in self.desks:
            desk.cancel(op)
        return True

    def working_sessions(self) -> set[str]:
        """Sessions with operations that can go on; one that waits for a number that never came cannot."""
        lanes = self.runs
        return {
            op.session_id for op in self._open.values() if op.lane not in lanes or lanes[op.lane].missing(op) is None
        }

    def queue_lengths(self) -> dict[str, int]:
        return {
            "open": len(self._open),
            "running": sum(op.running for op in self._open.values()),
            "runs": len(self.runs),
        }


def _moves_samplers(op: Operation) -> bool:
    """Whether the inflight samplers of its run move to what `op` saves."""
    return isinstance(op.plan, NewSampler) and op.plan.inflight


def _closed(run_id: str) -> Update:
    return update(tables.Run).where(tables.Run.id == run_id).values(state="closed")
