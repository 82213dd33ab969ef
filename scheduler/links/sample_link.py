"""The generator's link in production: it leases samples from the shared queue by itself, under the same messages as
over a socket (`scheduler.links.sockets`).

It keeps its samples as long as it gives signs of life, from a thread. If it was given up, because it was cut off for
too long or Redis has lost everything, the generator is told to cancel those samples, and its answers to them are
dropped. While Redis is away the generator goes on with its samples, and the link keeps the answers.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from scheduler.links.broadcasts import Broadcasts, Listener
from scheduler.links.contract import Lease, QueueUnreachable
from scheduler.links.large_results import is_large, pack
from scheduler.links.leading import Looked
from scheduler.links.messages import (
    Cancel,
    Declined,
    Done,
    Drawn,
    Failure,
    Occupancy,
    PolicyMoved,
    PullSamples,
    SampleOp,
    SampleWork,
)
from scheduler.links.policies import Followed, PolicyBoard
from scheduler.links.redis_queue import RedisQueue
from store.blobs.contract import Blobs

log = logging.getLogger(__name__)

#: A worker that gives no sign of life for this long loses its samples.
LEASE_S = 6.0
BEAT_S = 1.0
#: The shortest pause between two attempts of a busy generator to lease more.
LOOK_EVERY_S = 0.01

#: The shortest pause of one that has no slot free, and looks for those it would set others aside for.
LOOK_FULL_S = 0.1

#: How many answers, of up to `INLINE_BYTES` each, travel together.
MOST_ANSWERS = 16
#: How many larger answers, which are blobs on their way, are put at once.
LARGE_AT_ONCE = 4
#: How long the end waits for large answers being put; after that the samples are done again by others.
PUT_WITHIN_S = 10.0

_decode = msgspec.msgpack.Decoder(SampleOp).decode


def worker_name(role: str) -> str:
    """A name unique to this process, which tells an operator where it runs."""
    return f"{role}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


class SampleLink:
    def __init__(self, url: str, blobs: Blobs) -> None:
        self.name = worker_name("generator")
        self._queue, self._broadcasts, self._blobs = RedisQueue(url), Broadcasts(url), blobs
        self._epochs: dict[str, int] = {}  # by sample held: the epoch of its lease
        self._lost: set[str] = set()  # cancelled here because the lease was lost: their answers do not count
        self._again: list[Lease] = []  # leased again while the generator still cancels them
        self._late: list[Callable[[], object]] = []  # calls to the queue that wait for Redis
        self._answers: list[tuple[Done, int]] = []  # answers that wait for Redis, each with its epoch
        self._large = ThreadPoolExecutor(LARGE_AT_ONCE, thread_name_prefix="large-answers")
        self._handing_over: set[Future[None]] = set()
        self._closed = threading.Event()
        self._told: queue.SimpleQueue[Cancel | PolicyMoved] = queue.SimpleQueue()
        self._board, self._followed = PolicyBoard(url), Followed()
        self._leader = Looked()
        self._missed = threading.Event()  # set after a gap, in which messages may have been missed
        self._models: list[str] = []
        self._free = self._yields = 0
        self._counted_on = False  # whether the queue knows of free slots
        self._looked = self._beaten = 0.0
        self._draining = False
        self._lock = threading.Lock()
        self._listener = Listener.of_workers(url, self.name, self._told.put, self._missed.set, self._beat)
        self._listener.start()

    def drain(self) -> None:
        """Lease nothing more."""
        self._draining = True

    def close(self) -> None:
        """Deliver the remaining answers, if Redis answers; else those samples are done again by others."""
        self._closed.set()
        with suppress(QueueUnreachable):
            self._deliver()
        wait(list(self._handing_over), PUT_WITHIN_S)
        self._large.shutdown(wait=False, cancel_futures=True)
        self._listener.stop()
        self._queue.close()
        self._broadcasts.close()
        self._board.close()

    def send(self, message: Any) -> None:
        match message:
            case PullSamples():
                with self._lock:
                    self._models, self._free, self._yields = message.models, message.free_slots, message.yields
            case Done():
                self._answer(message)
            case Drawn():
                self._stream(message)
            case Declined() if message.lost:
                self._lose(message.op_id)
            case Declined():
                self._decline(message)
            case Occupancy():
                counts = msgspec.structs.asdict(message)
                counts["busy_s"] = counts.pop("seconds")
                with suppress(QueueUnreachable):
                    self._broadcasts.count(counts, self.name)

    def recv(self, timeout_s: float | None = None) -> SampleWork | Cancel | PolicyMoved | None:
        """The next message, or None if there is none within `timeout_s`."""
        deadline = time.monotonic() + (1e9 if timeout_s is None else timeout_s)
        while True:
            try:
                self._deliver()
                self._catch_up()
                while not self._told.empty():
                    told = self._told.get()
                    if isinstance(told, Cancel) or self._followed.hear(told):
                        return told
                work = self._take()
                left = deadline - time.monotonic()
                if work is not None or left <= 0:
                    return work
                can_take = self._free > 0 and not self._draining
                self._queue.wait(self.name, self._models if can_take else [], max(0.05, min(left, BEAT_S)))
                self._looked = 0.0
            except QueueUnreachable as error:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                log.warning("%s; trying again", error, exc_info=error)
                time.sleep(min(left, BEAT_S))

    def _take(self) -> SampleWork | None:
        now = time.monotonic()
        if self._draining:
            self._free = self._yields = 0
        if not (self._free > 0 or self._yields > 0):
            self._withdraw()
            return None
        if now - self._looked < (LOOK_EVERY_S if self._free > 0 else LOOK_FULL_S):
            return None
        self._looked = now
        self._renew()  # first: a lease would register this worker again, without the samples that it lost
        with self._lock:
            free = max(0, self._free)
            leases = self._again + self._queue.lease(self.name, self._models, free, LEASE_S, yields=self._yields)
            self._again = [lease for lease in leases if lease.id in self._lost]
            leases = [lease for lease in leases if lease.id not in self._lost]
            self._epochs.update({lease.id: lease.epoch for lease in leases})
        ops = self._newest([_decode(lease.body) for lease in leases])
        for op in ops:
            if self._free > 0:
                self._free -= op.num_samples
            else:
                self._yields -= op.num_samples
        self._counted_on = self._free > 0
        return SampleWork(ops) if ops else None

    def _withdraw(self) -> None:
        """Tell the queue that no slot is free any more: while it knows of one, full generators take no newcomers."""
        if self._counted_on:
            self._renew()
            with self._lock:
                self._queue.lease(self.name, self._models, 0, LEASE_S, most=0)
                self._counted_on = False

    def _newest(self, ops: list[SampleOp]) -> list[SampleOp]:
        """Give samples the newest policy: it may have moved while they waited. Leased samples must be handed over, so
        no error is raised."""
        policies: dict[str, PolicyMoved] = {}
        with suppress(QueueUnreachable):
            policies = self._board.known({op.run_id for op in ops if op.run_id})
        return [self._followed.hold(op, policies.get(op.run_id)) for op in ops]

    def _catch_up(self) -> None:
        """After a gap: read the policies of the followed runs."""
        if self._missed.is_set():
            self._missed.clear()
            try:
                for moved in self._board.known(self._followed.runs).values():
                    self._told.put(moved)
            except QueueUnreachable:
                self._missed.set()
                raise

    def _answer(self, done: Done) -> None:
        epoch = self._let_go(done.op_id)
        if epoch is None:
            return
        if is_large(done):
            handing_over = self._large.submit(self._hand_over, done, epoch)
            self._handing_over.add(handing_over)
            handing_over.add_done_callback(self._handing_over.discard)
        else:
            self._answers.append((done, epoch))

    def _hand_over(self, done: Done, epoch: int) -> None:
        """Store and deliver a large answer; in a thread, because the store may be slow or away, and no other answer or
        step should wait for it."""
        parcel = b""
        while True:
            try:
                parcel = parcel or pack(done, self._blobs)
                self._queue.answer(done.op_id, epoch, parcel)
                return
            except QueueUnreachable as error:
                log.warning("%s; trying again", error, exc_info=error)
            if self._closed.wait(BEAT_S):
                return

    def _stream(self, drawn: Drawn) -> None:
        """Send streamed tokens. If that fails, readers miss this part until the end: the answer contains it."""
        if drawn.op_id in self._epochs:
            with suppress(QueueUnreachable):
                self._broadcasts.drawn(drawn)

    def _lose(self, op_id: str) -> None:
        """The engine died over a sample: give it to any generator, since this one may take long to be back."""
        epoch = self._let_go(op_id)
        if epoch is not None:
            self._late.append(partial(self._queue.lose, op_id, epoch))

    def _decline(self, message: Declined) -> None:
        epoch = self._let_go(message.op_id)
        if epoch is not None:
            self._late.append(partial(self._hand_on, message.op_id, epoch, message.message))

    def _hand_on(self, op_id: str, epoch: int, why: str) -> None:
        """Leave the sample to a generator that can serve it; it fails when all have declined."""
        reasons = self._queue.decline(op_id, epoch, why)
        if reasons:
            done = Done(op_id, failure=Failure("; ".join(reasons), "user"))
            self._answers.append((done, epoch))

    def _let_go(self, op_id: str) -> int | None:
        """Forget a held sample. Returns the epoch of its lease, or None if it was lost meanwhile."""
        self._followed.drop(op_id)
        with self._lock:
            self._lost.discard(op_id)
            return self._epochs.pop(op_id, None)

    def _deliver(self) -> None:
        while self._late:
            self._late[0]()
            self._late.pop(0)
        while self._answers:
            some = self._answers[:MOST_ANSWERS]
            self._queue.answer_all((done.op_id, epoch, pack(done, self._blobs)) for done, epoch in some)
            del self._answers[: len(some)]

    def _beat(self) -> None:
        """Called by the listener's thread about once a second."""
        if time.monotonic() - self._beaten < BEAT_S:
            return
        self._beaten = time.monotonic()
        with suppress(QueueUnreachable):
            self._leader.found(self._queue.is_led())
            if self._epochs:
                self._renew()
                return
            with self._lock:  # so that nothing is leased between reading the free slots and reporting them
                # samples that others decline may wait for this worker
                if self._models and not (self._epochs or self._draining):
                    self._queue.lease(self.name, self._models, max(0, self._free), LEASE_S, most=0)
                    self._counted_on = self._free > 0

    def _renew(self) -> None:
        """Give a sign of life. If it comes too late, cancel the samples that were lost."""
        with self._lock:
            if not self._epochs or self._queue.renew(self.name, LEASE_S):
                return
            lost, self._epochs, self._again = list(self._epochs), {}, []
            self._lost.update(lost)
        log.warning("given up by the queue: %d samples are cancelled here and done by others", len(lost))
        for op_id in lost:
            self._told.put(Cancel(op_id))
