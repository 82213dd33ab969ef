"""Where generators come for work in the embedded service: between the fair queue and their links.

A generator says how many slots it has free, and the desk leases for it (`scheduler.dispatch.handing_out`). It keeps its
samples until its link closes: then it is dead, and its samples are queued again at once.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from scheduler.dispatch.handing_out import Offer, announce, hand_out
from scheduler.journal.journal import Journal
from scheduler.journal.samples.sampling import GAVE_UP, cut_off, message_of, samples_of, undrawn
from scheduler.links.contract import Lease
from scheduler.links.messages import (
    Cancel,
    Declined,
    Done,
    Drain,
    Drawn,
    Failure,
    Occupancy,
    PolicyMoved,
    PullSamples,
    SampleOp,
    SampleWork,
)
from scheduler.links.sockets import Link
from scheduler.order.operations import SAMPLE, Operation
from scheduler.order.presence import LoadingFor, Presence, Present, nobody_loads
from scheduler.order.roster import remember
from scheduler.order.timings import Stretch

_COUNTS = {"steps": 0, "slots_busy": 0, "slots_offered": 0, "drafted": 0, "accepted": 0}


@dataclass(frozen=True)
class _Held:
    op: Operation
    epoch: int


@dataclass(eq=False)
class _Generator:
    """One generator, while its link is open. `refused` has the adapters that it cannot serve, each with the reason."""

    name: str
    link: Link
    offer: Offer
    held: dict[str, _Held] = field(default_factory=dict)
    refused: OrderedDict[str, str] = field(default_factory=OrderedDict)
    stats: dict[str, float] = field(default_factory=dict)


class SampleDesk:
    """Hands out samples to generators. A sample that all present generators have declined waits until `expected`
    generators have come, and fails when all of them have declined it. `loading_s` says for how long a generator has
    been loading a model."""

    worker = "generator"

    def __init__(self, journal: Journal, expected: int = 1, loading_s: LoadingFor = nobody_loads) -> None:
        self._journal, self._queue = journal, journal.sample_queue
        self._queue.expect(expected)
        self._generators: dict[str, _Generator] = {}  # by the worker's name at the queue
        self._lives = 0
        self._presence, self._loading_s = Presence(), loading_s
        self.stats: dict[str, Any] = {**_COUNTS, "busy_s": 0.0, "lost": 0}
        journal.desks.append(self)

    async def serve(self, link: Link, name: str = "generator") -> None:
        """Talk to one generator until its link closes."""
        self._lives += 1
        worker = f"{name} {self._lives}"  # a restarted generator is another worker
        generator = self._generators[worker] = _Generator(name, link, Offer(worker))
        try:
            async for message in link.messages():
                self._on(generator, message)
        finally:
            del self._generators[worker]
            self._lost(generator)

    def wake(self) -> None:
        """Fill the free slots that generators have offered."""
        given: dict[str, list[Operation]] = {}

        def take(worker: str, lease: Lease) -> None:
            op = self._take(self._generators[worker], lease)
            if op is not None:
                given.setdefault(worker, []).append(op)

        hand_out(self._queue, [generator.offer for generator in self._generators.values()], take)
        for worker, ops in given.items():
            generator = self._generators[worker]
            self._begin(generator, ops)
            generator.link.send(SampleWork([self._message(op) for op in ops]))

    def cancel(self, op: Operation) -> None:
        generator = self._generators.get(self._queue.holder(op.id) or "")
        if generator is not None:
            generator.link.send(Cancel(op.id))
        elif op.kind == SAMPLE and self._queue.remove(op.id):
            self._journal.finish(undrawn(op))

    def policy_moved(self, moved: PolicyMoved) -> None:
        """Tell every generator that samples from this run."""
        facts = self._journal.samplers.facts
        for generator in self._generators.values():
            if any(facts(held.op.lane).run_id == moved.run_id for held in generator.held.values()):
                generator.link.send(moved)

    def drain(self) -> None:
        """Let generators finish the samples that a client may still fetch; cut off the others."""
        for generator in self._generators.values():
            generator.offer.free = generator.offer.yields = 0
            for held in generator.held.values():
                if (end := cut_off(held.op)) is not None:
                    self._journal.finish(end)
                    generator.link.send(Cancel(held.op.id))
            generator.link.send(Drain())

    def presence(self, base_model: str) -> Present:
        told = [generator.offer.models for generator in self._generators.values()]
        serves = any(not models or base_model in models for models in told)
        return Present(bool(told), serves, self._loading_s(base_model), self._presence.missing_s(base_model))

    def replicas(self) -> dict[str, dict[str, Any]]:
        """For each connected generator, by name: its counts, and how many samples it holds."""
        return {one.name: {**one.stats, "held": len(one.held)} for one in self._generators.values()}

    def _take(self, generator: _Generator, lease: Lease) -> Operation | None:
        """Take over a leased sample for a generator. None if the sample has ended, or the generator cannot serve its
        adapter."""
        op = self._journal.opened(lease.id)
        if op is None:
            self._queue.forget(lease.id)
            return None
        why = generator.refused.get(self._adapter(op))
        if why is not None:
            self._hand_on(op, lease.epoch, why)
            return None
        generator.held[op.id] = _Held(op, lease.epoch)
        generator.offer.fill(samples_of(op))
        return op

    def _begin(self, generator: _Generator, taken: list[Operation]) -> None:
        now = datetime.now(UTC)
        ops = [held.op for held in generator.held.values()]
        samplers, organisations = len({op.lane for op in ops}), len({op.org_id for op in ops})
        tokens = sum(op.tokens for op in ops)
        for op in taken:
            op.running = True
            op.timings.begin(Stretch(0, samplers, organisations, tokens, now))

    def _message(self, op: Operation) -> SampleOp:
        sampler = self._journal.samplers.facts(op.lane)
        return message_of(op, sampler, self._journal.training.versions.get(sampler.run_id or "", 0))

    def _adapter(self, op: Operation) -> str:
        return self._journal.samplers.facts(op.lane).adapter_ref

    def _on(self, generator: _Generator, message: Any) -> None:
        if isinstance(message, Done):
            if self._drop(generator, message.op_id) is not None:
                self._journal.finish(message)
                self._queue.forget(message.op_id)
                self.wake()  # the next of its flow may be a newcomer, for whom a full generator makes way
        elif isinstance(message, Drawn):
            if message.op_id in generator.held:
                self._journal.streams.hear(message)
        elif isinstance(message, PullSamples):
            offer = generator.offer
            offer.models, offer.free, offer.yields = message.models, message.free_slots, message.yields
            announce(self._queue, generator.offer)
            self._expire()  # this may be the last of the expected generators
            self.wake()
        elif isinstance(message, Declined):
            self._decline(generator, message)
        elif isinstance(message, Occupancy):
            for name in _COUNTS:
                self.stats[name] += getattr(message, name)
                generator.stats[name] = generator.stats.get(name, 0) + getattr(message, name)
            self.stats["busy_s"] += message.seconds

    def _drop(self, generator: _Generator, op_id: str) -> _Held | None:
        """A generator no longer holds the sample; returns what it held."""
        held = generator.held.pop(op_id, None)
        if held is not None:
            generator.offer.busy -= samples_of(held.op)
        return held

    def _decline(self, generator: _Generator, message: Declined) -> None:
        held = self._drop(generator, message.op_id)
        if held is None:
            return
        _stop(held.op)
        if message.lost:
            self._queue.lose(held.op.id, held.epoch)
            self._expire()
        else:
            if message.adapter and (adapter := self._adapter(held.op)):
                remember(generator.refused, adapter, message.message)
            self._hand_on(held.op, held.epoch, message.message)
        self.wake()

    def _hand_on(self, op: Operation, epoch: int, why: str) -> None:
        """Leave the sample to a generator that can serve it; it fails when all have declined."""
        reasons = self._queue.decline(op.id, epoch, why)
        if reasons:
            self._fail(op.id, Failure("; ".join(reasons), "user"))

    def _lost(self, generator: _Generator) -> None:
        """Put the samples of a generator that is gone back into the queue."""
        self.stats["lost"] += 1
        self._presence.saw(generator.offer.models)
        for held in generator.held.values():
            _stop(held.op)
        self._queue.renew(generator.offer.worker, -math.inf)
        self._expire()
        self.wake()

    def _expire(self) -> None:
        expired = self._queue.expire()
        for op_id in expired.given_up:
            self._fail(op_id, Failure(GAVE_UP))
        for op_id, reasons in expired.declined:
            self._fail(op_id, Failure("; ".join(reasons), "user"))

    def _fail(self, op_id: str, failure: Failure) -> None:
        self._journal.finish(Done(op_id, failure=failure))
        self._queue.forget(op_id)


def _stop(op: Operation) -> None:
    """The sample is in no generator's hands any more."""
    op.running = False
    op.timings.end(datetime.now(UTC))
