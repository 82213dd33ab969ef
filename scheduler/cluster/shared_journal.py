"""The journal as each of several API replicas has it.

A replica accepts operations, which the database makes durable, and tells how they ended, which the database knows.
Samples go through the shared queue: generators lease them, and whichever replica comes first settles their answers. The
operations of runs go to the replica that leads (`scheduler.cluster.term`). What Redis carries may be lost at any
time: the leader finds in the database what is accepted and queued nowhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
from sqlalchemy.exc import NoResultFound

from billing.prices import PriceList
from scheduler.cluster.cancels import Cancels
from scheduler.cluster.completions import SharedFeeds
from scheduler.cluster.numbers import Key, Number, numbers_of
from scheduler.cluster.outbox import Gathered, Outbox
from scheduler.cluster.shared_limits import BacklogBoard, in_flight
from scheduler.cluster.stored import StoredOperations
from scheduler.cluster.streams import SharedStreams
from scheduler.cluster.waiters import Waiters
from scheduler.journal.accepting.acceptance import Acceptance
from scheduler.journal.accepting.admission import Admission
from scheduler.journal.accepting.backlog import Backlog
from scheduler.journal.accepting.in_flight import InFlight
from scheduler.journal.ending.completions import Completion, FeedKey
from scheduler.journal.ending.meters import Meters
from scheduler.journal.ending.outcomes import Answers
from scheduler.journal.ending.recording import DatabaseRecorder
from scheduler.journal.ending.tellings import telling
from scheduler.journal.rows import from_row, pack
from scheduler.journal.samples.samplers import Samplers
from scheduler.journal.samples.sampling import item_of, message_of, undrawn
from scheduler.journal.storing import Storing
from scheduler.journal.weights import expected_costs_of
from scheduler.links.broadcasts import Accepted, Broadcasts, Ended, Told
from scheduler.links.loading import Loading, LoadingBoard, longest
from scheduler.links.messages import Done, OpKind
from scheduler.links.redis_queue import RedisQueue
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
from scheduler.order.presence import Presence, Present, queued_for
from store import tables
from store.blobs.contract import Blobs
from store.blobs.room import Room
from store.database.db import Database
from store.settings import Limits

log = logging.getLogger(__name__)
T = TypeVar("T")

#: How often clients that wait for an outcome look into the database, in case its broadcast was lost.
LOOK_AGAIN_S = 5.0
#: How often replicas tell each other what they have queued.
EXCHANGE_S = 1.0
#: Results up to this size are told to all replicas, so that those who wait for them need not read them.
TOLD_BYTES = 2048
#: How many numbers found to be unused are remembered until their operations come; others are looked up again.
MOST_FRESH = 10_000

_encode = msgspec.msgpack.Encoder().encode


class SharedJournal:
    """A `scheduler.journal.front.OperationJournal`. Blocking calls go to `threads`. `name` is the name of this replica.
    `waiting_of` says what an operation waits for; only the replica that leads knows that."""

    def __init__(
        self,
        database: Database,
        blobs: Blobs,
        prices: PriceList,
        max_queued_per_org: int,
        max_queued_bytes_per_org: int,
        *,
        name: str,
        queue: RedisQueue,
        broadcasts: Broadcasts,
        board: BacklogBoard,
        loads: LoadingBoard,
        threads: Executor,
        waiting_of: Callable[[str], Waiting | None],
        limits: Limits | None = None,
    ) -> None:
        self.completions = SharedFeeds(broadcasts.reserve)
        self.streams = SharedStreams(lambda op_id: self.reach(broadcasts.drawn_before, op_id))
        self.meters = Meters()
        self.in_flight = InFlight(lambda *asked: self.run(in_flight, database, *asked))
        self.answers = Answers(database, blobs)
        self.samplers = Samplers(database, runs_move_elsewhere=True)
        self.draining = False
        self.reachable: Callable[[], bool] = lambda: True  # whether Redis is reachable, as far as this replica knows
        self.others = 0  # how many other replicas take answers
        self.generators: dict[str, float] = {}  # latest counts over all generators
        self.each_generator: dict[str, dict[str, float]] = {}  # latest counts of each generator that has worked lately
        self.loading: list[Loading] = []  # workers that load a model, as last read
        self._presence = Presence()  # when generators of each base model were last seen
        self.stored = StoredOperations(database)
        self._database, self._costs = database, expected_costs_of(database)
        self._name, self._queue, self._broadcasts, self._threads = name, queue, broadcasts, threads
        self._waiting_of, self._board, self._loads = waiting_of, board, loads
        self._backlog = Backlog(max_queued_per_org, max_queued_bytes_per_org)
        self._waiters = Waiters()
        self._numbers = Gathered[Key, Number](lambda keys: self.run(numbers_of, database, keys))
        self._fresh: dict[tuple[str, int], bool] = {}  # by unused number: whether its run is open
        self._cancels = Cancels(queue, broadcasts, self.run)
        self._samples = Outbox[Operation](self.push)
        self._accepted = Outbox[Accepted](lambda notes: self.reach(broadcasts.accepted, notes))
        self._ended = Outbox[Ended](lambda ends: self.reach(broadcasts.ended, ends))
        room = Room(blobs.root)
        self._storing = Storing(database, blobs, room)
        self._recorder = DatabaseRecorder(database, blobs, prices, room, self.answers, self.samplers)
        acceptance = Acceptance(database, blobs, prices, limits or Limits())
        self._admission = Admission(acceptance, room, self._backlog, self.in_flight, self.answers, self.meters, self)
        self._open = self._admission.open

    # ---- accepting, and the `Queues` of its admission

    async def accept(self, new: NewOperation, *rows: tables.Base) -> str:
        return await self._admission.accept(new, rows)

    async def check(self, new: NewOperation) -> None:
        if self.draining:
            raise Draining("the server is restarting; another one takes it")
        if not self.reachable():
            raise Draining("the queue cannot be reached: nothing new is accepted until it is back; results can be had")
        run_open = self._fresh.pop((new.lane, new.seq), None)
        if new.kind in (SAMPLE, OpKind.CREATE):
            return
        if run_open is None:
            run_open = (await self._numbers.get((new.lane, new.seq))).run_open
        if not run_open:
            raise RunClosed(f"run {new.lane} is closed: its session has ended, or it is a copy of weights")

    async def taken(self, lane: str, seq: int) -> bool:
        number = await self._numbers.get((lane, seq))
        if number.taken:
            self._fresh.pop((lane, seq), None)
            return True
        if len(self._fresh) >= MOST_FRESH:
            self._fresh.clear()
        self._fresh[lane, seq] = number.run_open
        return False

    def maybe_stored(self, new: NewOperation) -> bool:
        """False for a number just found to be unused: if another replica accepts it at this moment, the insert finds
        that out."""
        return (new.lane, new.seq) not in self._fresh

    def put(self, op: Operation) -> None:
        told = self._samples.put(op) if op.kind == SAMPLE else self._accepted.put(Accepted(op.id, packed=pack(op)))
        self._storing.in_background(told)

    async def adopt(self, request_id: str) -> None:
        """Nothing to do: the leader finds the operation in the database."""

    def skip(self, op: Operation) -> None:
        self._storing.in_background(self._accepted.put(Accepted(op.id)))

    async def push(self, ops: Sequence[Operation]) -> None:
        """Put samples into the shared queue, which ignores those that it already has."""
        await self.reach(self._push, ops)

    def _push(self, ops: Sequence[Operation]) -> None:
        """`push` in a thread: it may have to read about samplers and weights from the database."""
        items = []
        for op in ops:
            op.charged = self._costs.expected(op)
            try:
                sampler = self.samplers.facts(op.lane)
            except NoResultFound:  # one bad sample does not hold up the others
                log.warning("operation %s: there is no sampler %s", op.id, op.lane)
                continue
            message, packed = _encode(message_of(op, sampler)), pack(op, body=False)
            items.append(item_of(op, sampler, self._costs.weight(op.org_id), message, packed))
        self._queue.push_all(items)

    async def reach(self, call: Callable[..., T], *arguments: Any) -> T | None:
        """Call Redis. A failure, whatever it is, is only logged: the leader finds what is missing in the database, and
        no loop of the server ends by it."""
        try:
            return await self.run(call, *arguments)
        except Exception as error:
            log.warning("%s", error, exc_info=error)
            return None

    async def run(self, call: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: call(*arguments))

    # ---- waiting

    async def outcome(self, org_id: str, request_id: str, timeout_s: float) -> Outcome | Waiting | Gone | None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        looked = False
        with self._waiters.on(request_id) as waiters:
            while True:
                changed = waiters.changed
                if waiters.told is not None and waiters.org_id == org_id:
                    return waiters.told
                mine = self._open.get(request_id)  # an operation of this replica has not ended until that is heard
                if mine is not None and mine.org_id == org_id and not looked:
                    found: Operation | Outcome | Gone | None = mine
                else:
                    found = await self.run(self._look, org_id, request_id)
                looked = True
                if not isinstance(found, Operation):
                    return found
                left = deadline - loop.time()
                if left <= 0:
                    return await self._why(found)
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left, LOOK_AGAIN_S)):
                        await changed.wait()

    def _look(self, org_id: str, request_id: str) -> Operation | Outcome | Gone | None:
        with self._database.read() as session:
            row = session.get(tables.Operation, request_id)
        if row is None or row.org_id != org_id:
            return None
        return from_row(row) if row.state == "queued" else self.answers.found(org_id, request_id)

    async def _why(self, op: Operation) -> Waiting:
        if not self.reachable():
            return Waiting("active", "the queue cannot be reached; the operation is kept")
        if op.kind != SAMPLE:
            return self._waiting_of(op.id) or Waiting("active", "waiting for the trainer")
        if await self.reach(self._queue.holder, op.id) is not None:
            return Waiting("active", "running")
        ahead, served = await self.reach(self._queue.ahead, op.id), await self.look_for_workers()
        model, missing_s = op.base_model, self._presence.missing_s(op.base_model)
        found = Present(bool(served), model in served, longest(self.loading, "generator", model), missing_s)
        return queued_for("generator", ahead or 0, model, found)

    async def look_for_workers(self) -> set[str]:
        """Read which base models generators serve, and which workers load one."""
        served, loading = await self.reach(self._queue.served), await self.reach(self._loads.there)
        if served is None or loading is None:  # without Redis no worker could report itself either
            self._presence.forget()
        self._presence.saw(served or ())
        self.loading = loading or []
        return served or set()

    # ---- broadcasts

    def heard(self, ends: Sequence[Ended], first_stamp: int) -> None:
        """Operations have ended, on whichever replica."""
        for stamp, end in enumerate(ends, first_stamp):
            told, what = end.told, None
            if told is not None and end.op_id in self._waiters:
                what = Outcome(told.payload, told.content_type, told.error, told.category)
            self._over(end.op_id, end.org_id, what)
            if end.kind == SAMPLE:
                key = FeedKey.of(end.org_id, end.lane, end.seq)
                self.completions.heard(key, Completion(end.op_id, end.size_bytes), stamp)

    def _over(self, op_id: str, org_id: str, told: Outcome | None) -> None:
        """Forget an operation that has ended: it is not open here, and nobody waits for it."""
        op = self._open.get(op_id)
        if op is not None and not op.settling:
            self._admission.forget(op)
        self._waiters.wake(op_id, org_id, told)

    def missed(self) -> None:
        """Broadcasts may have been lost: everybody who waits looks into the database again."""
        self.completions.clear()
        self._waiters.wake_all()

    async def look_after(self) -> None:
        """For as long as the server runs: announce again operations that were accepted here and have ended, in case a
        broadcast was lost."""
        while True:
            await asyncio.sleep(LOOK_AGAIN_S)
            try:
                here = [op.id for op in self._open.values() if not op.settling]
                await self.tell_again(await self.run(self.stored.ended, here))
                self.generators = await self.reach(self._broadcasts.generators) or self.generators
                self.each_generator = await self.reach(self._broadcasts.each_generator) or {}
                await self.look_for_workers()
            except Exception:
                log.exception("cannot see what has ended; looking again")

    async def tell_again(self, rows: Sequence[tables.Operation]) -> None:
        ends = [Ended(row.id, row.org_id, row.lane, row.seq, row.kind, row.result_bytes) for row in rows]
        await asyncio.gather(*map(self._ended.put, ends))

    async def exchange_backlogs(self) -> None:
        """For as long as the server runs: exchange backlogs, so that limits hold over all replicas."""
        while True:
            others = await self.reach(self._board.exchange, self._name, self._backlog.own())
            if others is not None:
                self._backlog.hear(others)
                self.others = len(others)
            await asyncio.sleep(EXCHANGE_S)

    # ---- finishing samples

    def opened(self, op_id: str) -> Operation | None:
        """An operation that was accepted here and is not known to have ended."""
        return None if (op := self._open.get(op_id)) is None or op.settling else op

    async def end(self, op: Operation, done: Done) -> bool:
        """Settle an operation that no journal of this process holds. Returns False if it had ended already."""
        known = self._open.get(op.id)
        if known is not None and known.settling:
            return False
        if known is None:
            self._admission.take_over(op)
            known = op
        known.charged, known.timings, known.settling = op.charged, op.timings, True
        known.timings.done(datetime.now(UTC))
        ended = await self._recorder.record(known, done)
        if ended is None:
            self._admission.forget(known)
            return False
        known.outcome = ended.outcome
        self._storing.drop_body(known)
        self._admission.end(known)
        self._storing.in_background(self.announce(known))
        return True

    def corrected(self, op: Operation, done: Done) -> int:
        """The tokens that a sample has used beyond what it was charged; fewer, if negative."""
        return self._costs.ended(op, done.facts)

    async def announce(self, op: Operation) -> None:
        """Tell every replica that `op` has its outcome; those who wait here at once."""
        outcome = op.outcome
        assert outcome is not None
        size, told = (len(outcome.payload) if outcome.error is None else None), None
        # an operation that failed by the server's fault may be done again
        final = outcome.error is None or outcome.category == "user"
        self._over(op.id, op.org_id, outcome if final else None)
        if final and len(outcome.payload) + len(outcome.error or "") <= TOLD_BYTES:
            told = Told(outcome.payload, outcome.content_type, outcome.error, outcome.category)
        await self._ended.put(Ended(op.id, op.org_id, op.lane, op.seq, str(op.kind), size, told))

    async def flush(self) -> None:
        """Wait until everything that was begun is stored and told."""
        await self._storing.flush()

    async def stop(self, within_s: float) -> None:
        """`flush`, but not for ever: what still cannot be stored is done again by others, or after a restart."""
        await self._storing.stop(within_s)

    # ---- what the front asks for

    async def cancel(self, org_id: str, request_id: str) -> bool:
        op = await self.run(self.stored.queued, request_id)
        if op is None or op.org_id != org_id or op.kind != SAMPLE:
            return False
        self._storing.in_background(self._cancel(op))
        return True

    async def _cancel(self, op: Operation) -> None:
        if await self._cancels.withdraw(op.id):
            await self.end(op, undrawn(op))

    async def tell_failure(self, org_id: str, request_id: str) -> None:
        told = await self.run(telling, self._database, org_id, request_id)
        if told is not None:
            await self._accepted.put(Accepted(told=told))

    def close_run(self, run_id: str) -> None:
        self._storing.in_background(self._accepted.put(Accepted(closed_run=run_id)))

    async def working_sessions(self) -> set[str]:
        return await self.run(self.stored.working_sessions)

    async def queue_lengths(self) -> dict[str, int]:
        return await self.run(self.stored.lengths)
