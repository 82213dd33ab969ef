"""The operation journal of the embedded service: what was accepted, in which order it may run, and how it ended.

Invariants: an accepted operation is durable before its request id is given out; (lane, seq) names one operation for
ever; an operation's result, its metering and its state become durable in one commit, and only then does anyone waiting
for it wake. The journal lives in one event loop. `api` calls accept and outcome, the desks (`scheduler.dispatch`)
take work out of `training.queue` and `sample_queue` and bring results back through `finish`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime

import anyio.to_thread
from sqlalchemy.exc import OperationalError, TimeoutError as PoolTimeout

from billing.prices import PriceList
from scheduler.journal.accepting.acceptance import Acceptance
from scheduler.journal.accepting.admission import Admission
from scheduler.journal.accepting.backlog import Backlog
from scheduler.journal.accepting.in_flight import InFlight
from scheduler.journal.accepting.numbers import Highest, highest, known
from scheduler.journal.ending.completions import CLIENT_STRIDE, Completion, FeedKey, LocalFeeds
from scheduler.journal.ending.meters import Meters
from scheduler.journal.ending.outcomes import Answers
from scheduler.journal.ending.recording import DatabaseRecorder
from scheduler.journal.ending.tellings import telling
from scheduler.journal.front import WORK_WAITS
from scheduler.journal.rows import from_row
from scheduler.journal.samples.samplers import Samplers
from scheduler.journal.samples.sampling import cut_off, item_of
from scheduler.journal.samples.streams import LocalStreams
from scheduler.journal.storing import Storing
from scheduler.journal.training import Training, in_line, moves_samplers, under_way
from scheduler.journal.weights import expected_costs_of
from scheduler.links.messages import Done, OpKind
from scheduler.order.light_work import SizesOf, unknown_sizes
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
from store import tables
from store.blobs.contract import Blobs
from store.blobs.room import Room
from store.database.db import Database
from store.settings import Limits

log = logging.getLogger(__name__)

#: Pause before another attempt to read which weights a sampler uses.
READ_AGAIN_S = 0.2


class Journal:
    """A `scheduler.journal.front.OperationJournal`."""

    def __init__(
        self,
        database: Database,
        blobs: Blobs,
        prices: PriceList,
        max_queued_per_org: int = 20_000,
        max_queued_bytes_per_org: int = 1 << 30,
        room: Room | None = None,
        sizes: SizesOf = unknown_sizes,
        limits: Limits | None = None,
    ) -> None:
        self.sample_queue = LocalQueue(time.monotonic)
        self.completions = LocalFeeds()
        self.streams = LocalStreams()
        self.meters = Meters()
        self.in_flight = InFlight()
        self.answers = Answers(database, blobs)
        self.samplers = Samplers(database)
        self.draining = False
        self._database = database
        self._costs = expected_costs_of(database)
        self._highest = Highest()
        self._room = room = room or Room(blobs.root)
        self._storing = Storing(database, blobs, room)
        self._recorder = DatabaseRecorder(database, blobs, prices, room, self.answers, self.samplers)
        self.training = Training(
            database, blobs, self._storing, self._recorder, self._costs.known_weight, self._training_ended, sizes
        )
        self.desks = self.training.desks
        self._admission = Admission(
            Acceptance(database, blobs, prices, limits or Limits()),
            room,
            Backlog(max_queued_per_org, max_queued_bytes_per_org),
            self.in_flight,
            self.answers,
            self.meters,
            self,
        )
        self._open = self._admission.open

    # ---- accepting, and the `Queues` of its admission

    async def accept(self, new: NewOperation, *rows: tables.Base) -> str:
        return await self._admission.accept(new, rows)

    async def check(self, new: NewOperation) -> None:
        await self._learn(new)
        if self.draining:
            raise Draining("the server is restarting; it takes work again in a moment")
        lane = self.training.runs.get(new.lane)
        if new.kind not in (SAMPLE, OpKind.CREATE) and (lane is None or lane.closing):
            raise RunClosed(f"run {new.lane} is closed: its session has ended, or it is a copy of weights")

    async def _learn(self, new: NewOperation | Operation) -> None:
        """Read in threads what the event loop needs to queue the operation: the event loop waits for no database."""
        if not self._costs.weight_lasts(new.org_id):
            await anyio.to_thread.run_sync(self._costs.weight, new.org_id)
        if new.kind == SAMPLE:
            await self.samplers.learn(new.lane)

    async def taken(self, lane: str, seq: int) -> bool:
        if not self._may_be_taken(lane, seq):
            return False
        of_run = lane in self.training.runs
        taken, number = await anyio.to_thread.run_sync(self._look_up, lane, seq)
        # runs know their own numbers, which nobody reports to `_highest`
        if not (of_run or lane in self.training.runs):
            self._highest.found(lane, seq, number)
        return taken

    def maybe_stored(self, new: NewOperation) -> bool:
        return self._may_be_taken(new.lane, new.seq)

    def _may_be_taken(self, lane: str, seq: int) -> bool:
        run = self.training.runs.get(lane)
        return run.spent(seq) if run is not None else not self._highest.is_new(lane, seq)

    def _look_up(self, lane: str, seq: int) -> tuple[bool, int]:
        with self._database.read() as session:
            return known(session, lane, seq), highest(session, lane, seq // CLIENT_STRIDE)

    async def adopt(self, request_id: str) -> None:
        row = await anyio.to_thread.run_sync(self._row, request_id)
        if row is not None and row.state == "queued":
            op = from_row(row)
            await self._learn(op)
            # unless it was queued or ended meanwhile
            if op.id not in self._open and self.answers.recent(op.id) is None:
                self.enqueue(op)

    def _row(self, request_id: str) -> tables.Operation | None:
        with self._database.read() as session:
            return session.get(tables.Operation, request_id)

    def skip(self, op: Operation) -> None:
        self.training.skip(op, op.outcome.error if op.outcome is not None else None)

    def enqueue(self, op: Operation) -> None:
        """Queue an operation that was accepted before."""
        self._admission.take_over(op)
        self.put(op)

    def recover(self, op: Operation) -> None:
        """Queue a sample that an earlier process accepted, unless it ends with that process."""
        if (end := cut_off(op)) is None:
            self.enqueue(op)
        else:
            self._admission.take_over(op)
            self.finish(end)

    def put(self, op: Operation) -> None:
        if op.kind == SAMPLE:
            self._highest.used(op.lane, op.seq)
            self.queue_sample(op)
            self.training.wake_soon()
        else:
            self.training.enqueue(op)

    def queue_sample(self, op: Operation) -> None:
        try:
            sampler = self.samplers.facts(op.lane)
        except (
            OperationalError,
            PoolTimeout,
        ) as error:  # it is queued as soon as the database answers
            log.warning("%s; again in %.1f s", self._room.refused(error), READ_AGAIN_S)
            self._storing.in_background(self._queue_later(op))
            return
        op.charged = self._costs.expected(op)
        self.sample_queue.push(item_of(op, sampler, self._costs.known_weight(op.org_id)))

    async def _queue_later(self, op: Operation) -> None:
        await asyncio.sleep(READ_AGAIN_S)
        self.queue_sample(op)
        self.wake()

    def wake(self) -> None:
        self.training.wake()

    # ---- waiting

    async def outcome(self, org_id: str, request_id: str, timeout_s: float) -> Outcome | Waiting | Gone | None:
        op = self._open.get(request_id) or self.answers.recent(request_id)
        if op is None:
            return await anyio.to_thread.run_sync(self.answers.found, org_id, request_id)
        if op.org_id != org_id:
            return None
        return op.outcome if await op.ends_within(timeout_s) else self._waiting(op)

    def _waiting(self, op: Operation) -> Waiting:
        """What `op` waits for, and its place in the queue."""
        if op.kind != SAMPLE:
            return self.training.waiting(op)
        begun = under_way(op)
        if begun is not None:
            return begun
        return in_line(self.desks, "generator", self.sample_queue.ahead(op.id) or 0, op.base_model)

    # ---- finishing

    def finish(self, done: Done) -> None:
        """Settle a worker's answer, then wake whoever waits for it."""
        op = self._open.get(done.op_id)
        if op is None or op.settling:
            return
        if op.kind != SAMPLE:
            self.training.finish(done)
            return
        op.settling = True
        op.timings.done(datetime.now(UTC))
        if done.failure is None:
            self.sample_queue.correct(op.path, self._costs.ended(op, done.facts))
        self._storing.in_background(self._settle(op, done))

    async def _settle(self, op: Operation, done: Done) -> None:
        ended = await self._recorder.record(op, done)
        if ended is None:
            return
        op.outcome = ended.outcome
        self._storing.drop_body(op)
        self._admission.end(op)
        self.streams.forget(op.id)
        size_bytes = len(op.outcome.payload) if op.outcome.error is None else None
        self.completions.publish(FeedKey.of(op.org_id, op.lane, op.seq), Completion(op.id, size_bytes))

    def _training_ended(self, op: Operation) -> None:
        ok = op.outcome is not None and op.outcome.error is None
        if ok and moves_samplers(op):
            self.samplers.moved(op.lane, op.target_ref)
        self._admission.end(op)

    def opened(self, op_id: str) -> Operation | None:
        """An operation that has not ended."""
        return self._open.get(op_id)

    async def flush(self) -> None:
        """Wait until every result handed in so far is settled."""
        await self._storing.flush()

    async def stop(self, within_s: float) -> None:
        """`flush`, but not for ever: a result that cannot be stored stays queued in the database, and is computed again
        after a restart."""
        self.training.stop()
        await self._storing.stop(within_s)

    # ---- what the front asks for

    async def tell_failure(self, org_id: str, request_id: str) -> None:
        told = await anyio.to_thread.run_sync(telling, self._database, org_id, request_id)
        if told is not None:
            self.training.told(told)

    def close_run(self, run_id: str) -> None:
        self.training.close_run(run_id)

    async def cancel(self, org_id: str, request_id: str) -> bool:
        op = self._open.get(request_id)
        if op is None or op.org_id != org_id or op.kind != SAMPLE:
            return False
        for desk in self.desks:
            desk.cancel(op)
        return True

    async def working_sessions(self) -> set[str]:
        lanes, since = self.training.runs, datetime.now(UTC) - WORK_WAITS
        return {
            op.session_id
            for op in self._open.values()
            if op.accepted_at > since and (op.lane not in lanes or lanes[op.lane].missing(op) is None)
        }

    async def queue_lengths(self) -> dict[str, int]:
        return {
            "open": len(self._open),
            "running": sum(op.running for op in self._open.values()),
            "runs": len(self.training.runs),
        }
