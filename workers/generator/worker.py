"""The loop of a generator process: pull sample operations as slots come free, step the engines, send results.

`Generator` is the loop over any link and any engines; `__main__` gives it real ones.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from scheduler.links.messages import Cancel, Drain, Occupancy, PolicyMoved, PullSamples, SampleOp, SampleWork, facts_of
from store import logs, tracing
from store.blobs.ahead import Ahead
from store.blobs.contract import Blobs, is_lasting
from workers.generator.engine import Engine, Finished
from workers.generator.requests.bodies import (
    PendingSample,
    answer,
    failure,
    inflight_name,
    policy_name,
    read_sample,
)
from workers.generator.requests.streaming import Streams
from workers.rest import Rest

log = logging.getLogger(__name__)

#: Seconds between two Occupancy reports.
REPORT_S = 0.5

#: How often an idle generator checks whether a signal has told it to stop.
IDLE_POLL_S = 0.5
#: How often a generator that waits only for bodies checks for other work.
COMING_S = 0.05
#: Seconds between two attempts at a read that the disk refused.
DISK_AGAIN_S = 0.2


class Link(Protocol):
    """The part of scheduler.links.sockets.WorkerLink that the loop uses."""

    def send(self, message: msgspec.Struct) -> None: ...

    def recv(self, timeout_s: float | None = None) -> Any: ...


class Generator:
    """Sequences of all models together take at most `slots`; each engine has that many of its own."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        blobs: Blobs,
        link: Link,
        *,
        slots: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines = dict(engines)
        self._blobs, self._bodies = blobs, Ahead(blobs)
        self._link = link
        self._slots = slots
        self._pending: dict[str, PendingSample] = {}  # samples that have not ended, by operation
        self._coming: dict[str, SampleOp] = {}  # samples whose bodies are being fetched, by operation
        self._inflight: dict[str, str] = {}  # current weights of inflight samplers: name in the engine -> ref
        self._offered = 0  # free slots that the server was told of and has not filled yet
        self._yielding = False  # whether it was told, and has not used, that others would be set aside
        self._draining = False
        self._aside: dict[str, SampleOp] = {}  # samples to begin again after an error of the disk, by operation
        self._tried, self._clock = clock(), clock
        self._meter = _OccupancyMeter(link, clock)
        self._streams = Streams(link, clock)
        self._rest = Rest(clock)

    def drain(self) -> None:
        """Pull no more; `serve` returns once all samples that have begun, or are about to, have ended."""
        self._draining = True

    def serve(self) -> None:
        """Work until drained. EOFError when the server is gone."""
        while not (self._draining and not (self._pending or self._coming)):
            self._pull()
            self._receive()
            self._try_again()
            self._wait_for_bodies()
            self._meter.begin()
            self._step()
            self._streams.tell()
            self._meter.observe(self._engines.values())
        self._meter.report()

    def _pull(self) -> None:
        """Offer free slots, again when there are more than the server knows of, and without one, those that others
        would be set aside for; withdraw the offer when an engine has lost them."""
        coming = sum(op.num_samples for op in self._coming.values())
        free, yields = self._free_slots(coming), 0
        if not free:
            yields = max(0, sum(engine.yields for engine in self._engines.values()) - coming)
        changed = free > max(self._offered, 0) or free == 0 < self._offered or (yields > 0) != self._yielding
        if changed and not self._draining:
            self._link.send(PullSamples(sorted(self._engines), free, yields))
            self._offered, self._yielding = free, yields > 0

    def _free_slots(self, coming: int) -> int:
        taken = sum(self._slots - engine.free_slots for engine in self._engines.values())
        return max(0, self._slots - taken - coming)

    def _receive(self) -> None:
        """Handle all messages of the server; wait for one when there is nothing else to do."""
        busy = self._pending or self._coming
        idle_s = DISK_AGAIN_S if self._aside else IDLE_POLL_S
        message = self._link.recv(0 if busy else idle_s)
        if busy or message is not None:
            self._rest.worked()
        else:
            self._rest.waited()
        while message is not None:
            self._on(message)
            message = self._link.recv(0)

    def _on(self, message: SampleWork | Cancel | PolicyMoved | Drain) -> None:
        match message:
            case SampleWork():
                if self._offered <= 0:
                    self._yielding = False
                self._offered -= sum(op.num_samples for op in message.ops)
                self._fetch(message.ops)
            case Cancel():
                pending = self._pending.get(message.op_id)
                finished = self._engines[pending.op.base_model].cancel(message.op_id) if pending is not None else None
                if finished is not None:
                    self._finish(finished)
                elif pending is None and message.op_id in self._aside.keys() | self._coming.keys():
                    self._coming.pop(message.op_id, None)
                    self._aside.pop(message.op_id, None)
                    self._link.send(failure(message.op_id, "cancelled before the disk had answered", "user"))
            case PolicyMoved():
                self._moved(message)
            case Drain():
                self.drain()

    def _moved(self, moved: PolicyMoved) -> None:
        """Move running requests to the new weights; stop those that are too old for their clients."""
        engines = {self._engines[o.op.base_model] for o in self._pending.values() if o.op.run_id == moved.run_id}
        for engine in engines:
            if moved.adapter_ref:
                self._follow(engine, inflight_name(moved.run_id), moved.adapter_ref)
            engine.run_moved(moved.run_id, moved.version)
        for op_id, pending in self._pending.items():  # samples that begin anew use these weights
            self._pending[op_id] = dataclasses.replace(pending, op=_after(pending.op, moved))
        self._aside = {op_id: _after(op, moved) for op_id, op in self._aside.items()}
        self._coming = {op_id: _after(op, moved) for op_id, op in self._coming.items()}

    def _follow(self, engine: Engine, name: str, ref: str) -> None:
        """Put the inflight samplers that the engine knows as `name` on the weights at `ref`."""
        if self._inflight.get(name, ref) != ref:
            engine.swap_adapter(name, self._blobs.at(ref))
        self._inflight[name] = ref

    def _fetch(self, ops: Iterable[SampleOp]) -> None:
        self._coming.update({op.op_id: op for op in ops})
        self._bodies.fetch((op.body_ref, op.body_sha256) for op in self._coming.values())
        self._begin()

    def _wait_for_bodies(self) -> None:
        """Wait for bodies, if there is nothing else to do; samples that have begun go on meanwhile."""
        if self._coming and not self._pending:
            self._bodies.wait(COMING_S)
        self._begin()

    def _begin(self) -> None:
        """Begin the samples whose bodies have come."""
        for op in [op for op in self._coming.values() if self._bodies.has(op.body_ref, op.body_sha256)]:
            del self._coming[op.op_id]
            self._add(op)

    def _add(self, op: SampleOp) -> None:
        engine = self._engines.get(op.base_model)
        if engine is None:
            self._link.send(failure(op.op_id, f"this generator does not serve {op.base_model}"))
            return
        try:
            pending = read_sample(op, self._blobs, self._bodies)
        except Exception as error:
            with logs.on(**facts_of(op)):
                log.exception("sample %s: its body cannot be read", op.op_id)
            if is_lasting(error):
                self._link.send(failure(op.op_id, f"the request cannot be read: {type(error).__name__}"))
            else:
                self._aside[op.op_id] = op
            return
        if op.inflight:
            self._follow(engine, policy_name(op), op.adapter_ref)
        self._pending[op.op_id] = pending
        engine.add(pending.request)
        if pending.stream:
            self._streams.open(op.op_id, engine, op.num_samples)
        if op.run_id:
            engine.run_moved(op.run_id, op.version)

    def _step(self) -> None:
        for engine in self._engines.values():
            if engine.busy:
                for finished in engine.step():
                    self._finish(finished)

    def _finish(self, finished: Finished) -> None:
        pending = self._pending.pop(finished.id, None)
        if pending is None:  # an id that came twice: the request has ended already
            return
        self._streams.close(finished.id)
        if finished.error is not None and finished.error.elsewhere == "later":
            self._aside[finished.id] = pending.op
            return
        _tell(pending, finished)
        self._link.send(answer(pending, finished))

    def _try_again(self) -> None:
        if not self._aside or self._clock() - self._tried < DISK_AGAIN_S:
            return
        self._tried = self._clock()
        samples, self._aside = self._aside, {}
        self._fetch(samples.values())


def _after(op: SampleOp, moved: PolicyMoved) -> SampleOp:
    if op.run_id != moved.run_id:
        return op
    ref = moved.adapter_ref if op.inflight and moved.adapter_ref else op.adapter_ref
    return replace(op, adapter_ref=ref, version=moved.version)


def _tell(pending: PendingSample, finished: Finished) -> None:
    """Write to the log and the traces."""
    op, failed = pending.op, finished.error is not None
    with logs.on(**facts_of(op)):
        log.debug("sample: %s", "failed" if failed else "generated")
    ids: dict[str, tracing.Value | None] = {"run": op.run_id, "operation": op.op_id, "samples": op.num_samples}
    tracing.span("generate", op.origin, pending.taken, datetime.now(UTC), ids, failed=failed)


#: The fields of an engine's stats that an `Occupancy` reports.
_TOTALS = ("decode_steps", "slots_busy", "slots_offered", "drafted_tokens", "accepted_tokens")


class _OccupancyMeter:
    """Reports the decode steps of all engines since the last report, about twice a second while there are any."""

    def __init__(self, link: Link, clock: Callable[[], float]) -> None:
        self._link = link
        self._clock = clock
        self._seen = self._now = (0,) * len(_TOTALS)
        self._working_s = 0.0
        self._begun = self._since = clock()

    def begin(self) -> None:
        """Call before the engines step."""
        self._begun = self._clock()

    def observe(self, engines: Iterable[Engine]) -> None:
        stats = [engine.stats() for engine in engines]
        now = self._clock()
        totals = tuple(sum(getattr(each, name) for each in stats) for name in _TOTALS)
        if totals[0] > self._now[0]:
            self._working_s += now - self._begun
        self._now = totals
        if now - self._since >= REPORT_S:
            self.report()

    def report(self) -> None:
        steps, busy, offered, *drafts = (now - seen for now, seen in zip(self._now, self._seen, strict=True))
        if steps:
            self._link.send(Occupancy(steps, busy, offered, self._working_s, *drafts))
        self._seen, self._working_s, self._since = self._now, 0.0, self._clock()
