"""Where workers come for work: one desk per kind of machine, between the journal's queues and the links.

A desk hands out work when a worker has asked for it and there is some, whichever comes last: pull, not push. What is
in a worker's hands when its link closes goes back to the queue; an operation that was there LIVES times when a worker
died is failed instead, so that it cannot take the service down with it.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

from scheduler.dispatch.replicas import Replica, choose, needed, samples_of
from scheduler.journal.journal import Journal
from scheduler.journal.training import Training
from scheduler.links.messages import (
    Cancel,
    Declined,
    Done,
    Drain,
    Failure,
    Occupancy,
    Pass,
    PassOver,
    PolicyMoved,
    PullPass,
    PullSamples,
    SampleOp,
    SampleWork,
    SetAside,
    Snapshot,
)
from scheduler.links.sockets import Link
from scheduler.order.compose import compose, upcoming
from scheduler.order.lanes import RunLane, Unit
from scheduler.order.operations import INTERACTIVE, SAMPLE, Operation
from scheduler.order.timings import Stretch

log = logging.getLogger(__name__)

#: How often an operation may be in a worker's hands when that worker dies, and get no further, before it is given up.
LIVES = 3
#: Requests that are set aside at most because only generators without a free slot can serve them.
MAX_ASIDE = 256

_COUNTS = {"steps": 0, "slots_busy": 0, "slots_offered": 0}


class TrainerDesk:
    """Hands out passes. One link at a time: the embedded service has one trainer."""

    worker = "trainer"

    def __init__(self, training: Training, pass_tokens: int) -> None:
        self._training = training
        self._pass_tokens = pass_tokens
        self._link: Link | None = None
        self._models: list[str] | None = None  # what the waiting pull can serve; None when none waits
        self._units: list[Unit] = []  # the pass in the trainer's hands
        self._aside: set[str] = set()  # runs that it has left out of this pass
        self._passes = 0
        self.stats = {"passes": 0, "shared_passes": 0, "tokens": 0, "busy_s": 0.0, "lost": 0}
        training.desks.append(self)

    async def serve(self, link: Link) -> None:
        """Talk to one trainer until its link closes."""
        self._link = link
        try:
            async for message in link.messages():
                await self._on(message)
        finally:
            self._link = self._models = None
            await self._lost()

    def wake(self) -> None:
        """Give the waiting trainer its next pass, if there is anything to do."""
        if self._link is None or self._models is None:
            return
        units = compose(self._training.queue, self._models, self._pass_tokens)
        release, self._training.released = self._training.released, []
        if not units and not release:
            return
        self._models = None
        self._units = units
        self._passes += 1
        self._begin(units)
        model = units[0].base_model if units else ""
        soon = upcoming(self._training.queue, model)
        self._link.send(Pass(self._passes, model, [u.send for u in units], release, soon))

    def _begin(self, units: list[Unit]) -> None:
        now = datetime.now(UTC)
        runs = len({u.send.run_id for u in units})
        organisations = len({u.op.org_id for u in units if u.op is not None})
        tokens = sum(u.tokens for u in units)
        for unit in units:
            if unit.op is not None:
                unit.op.running = True
                if not unit.send.replay:
                    unit.op.timings.begin(Stretch(self._passes, runs, organisations, tokens, now))

    def _end(self) -> list[Unit]:
        """The pass is over, one way or the other: nothing is in the trainer's hands. Returns what was."""
        now = datetime.now(UTC)
        held, self._units = self._units, []
        for unit in held:
            if unit.op is not None and not unit.send.replay:
                unit.op.timings.end(now)
        return held

    def cancel(self, op: Operation) -> None:
        """Training is never cancelled half way."""

    def policy_moved(self, moved: PolicyMoved) -> None:
        """Trainers know."""

    def drain(self) -> None:
        if self._link is not None:
            self._link.send(Drain())

    @property
    def attached(self) -> bool:
        return self._link is not None

    async def _on(self, message: Any) -> None:
        if isinstance(message, Done):
            self._training.finish(message)
        elif isinstance(message, PassOver):
            self._count(message)
        elif isinstance(message, Snapshot):
            await self._training.snapshot(message)
        elif isinstance(message, SetAside):
            self._aside.add(message.run_id)
            self._training.setbacks.set_aside(message)
        elif isinstance(message, PullPass):
            self._models = message.models
            self._got_on(self._end())
            self.wake()

    def _got_on(self, done: list[Unit]) -> None:
        """A pass is over: no trainer was lost over what was in it."""
        aside, self._aside = self._aside, set()
        for unit in done:
            send, lane = unit.send, self._training.runs.get(unit.send.run_id)
            if send.run_id in aside:
                continue
            if lane is not None:
                lane.got_on()
            if unit.op is not None and (send.final or send.stop > unit.op.reached):
                unit.op.reached, unit.op.attempts = send.stop, 0

    def _count(self, over: PassOver) -> None:
        organisations = {u.op.org_id for u in self._units if u.op is not None and not u.light and not u.send.replay}
        if not organisations:
            return
        self.stats["passes"] += 1
        self.stats["shared_passes"] += len(organisations) > 1
        self.stats["tokens"] += over.tokens
        self.stats["busy_s"] += over.seconds

    async def _lost(self) -> None:
        """The trainer is gone, and with it every run's state: queue again what rebuilds them."""
        self.stats["lost"] += 1
        held = self._end()
        await self._training.flush()
        for run_id in dict.fromkeys(unit.send.run_id for unit in held):
            if (lane := self._training.runs.get(run_id)) is not None:
                self._suspect(lane, [unit for unit in held if unit.send.run_id == run_id])
        await self._training.flush()
        for lane in list(self._training.runs.values()):
            self._training.rebuild(lane)
        self.wake()

    def _suspect(self, lane: RunLane, units: list[Unit]) -> None:
        """A trainer was lost with these in its hands. An operation over which that happens again and again, getting no
        further in between, is given up; a run that cannot be rebuilt for that reason waits, longer each time."""
        replayed = [u for u in units if u.op is None or u.send.replay]
        for op in (u.op for u in replayed if u.op is not None):
            op.alone = True
        lane.setbacks += bool(replayed)
        if replayed and lane.setbacks >= LIVES:
            self._training.setbacks.pause(lane, f"the trainer stopped {lane.setbacks} times while it rebuilt the run")
        for op in {u.op.id: u.op for u in units if u.op is not None and not u.send.replay}.values():
            if op.outcome is not None:
                continue
            op.running, op.alone = False, True
            op.attempts += 1
            if op.attempts < LIVES:
                continue
            if lane.is_past(op):  # what is behind it was computed on a run that it had changed
                self._training.setbacks.break_run(lane, _gave_up("trainer", op))
            else:
                self._training.finish(Done(op.id, failure=Failure(_gave_up("trainer", op))))


class GeneratorDesk:
    """Hands out sample requests as slots come free, to the generator that suits each best
    (`scheduler.dispatch.replicas`).

    `expected` generators are to come: what those who are here have declined waits for the others, and fails when all
    have."""

    worker = "generator"

    def __init__(self, journal: Journal, expected: int = 1) -> None:
        self._journal = journal
        self._expected = expected
        self._replicas: list[Replica] = []
        self._aside: list[Operation] = []  # taken from the queue, and nobody with a free slot can serve them
        self.stats: dict[str, Any] = {**_COUNTS, "busy_s": 0.0, "lost": 0}
        journal.desks.append(self)

    async def serve(self, link: Link, name: str = "generator") -> None:
        """Talk to one generator until its link closes."""
        replica = Replica(name, link)
        self._replicas.append(replica)
        try:
            async for message in link.messages():
                self._on(replica, message)
        finally:
            self._replicas.remove(replica)
            self._lost(replica)

    def wake(self) -> None:
        """Fill the free slots that generators have offered."""
        given: dict[Replica, list[Operation]] = {}
        aside, self._aside = self._aside, []
        for op in aside:
            self._place(op, given)
        while len(self._aside) < MAX_ASIDE and (next_op := self._next()) is not None:
            self._place(next_op, given)
        for replica, taken in given.items():
            self._begin(replica, taken)
            replica.link.send(SampleWork([self._send(op) for op in taken]))

    def cancel(self, op: Operation) -> None:
        replica = self._holder(op)
        if replica is not None:
            replica.link.send(Cancel(op.id))
        elif op.kind == SAMPLE and not op.running:
            if op in self._aside:
                self._aside.remove(op)
            else:
                for other in self._journal.sample_queue.remove(op.path):
                    if other is not op:
                        self._journal.queue_sample(other)
            self._journal.finish(Done(op.id, failure=Failure("cancelled before it started", "user")))

    def policy_moved(self, moved: PolicyMoved) -> None:
        """Tell every generator that samples from this run."""
        for replica in self._replicas:
            if any(self._journal.samplers.facts(op.lane).run_id == moved.run_id for op in replica.held.values()):
                replica.link.send(moved)

    def drain(self) -> None:
        for replica in self._replicas:
            replica.free = 0
            replica.link.send(Drain())

    @property
    def attached(self) -> bool:
        return bool(self._replicas)

    def replicas(self) -> dict[str, dict[str, Any]]:
        """Each generator that is here: its counts, and what it holds now."""
        return {replica.name: {**replica.stats, "held": len(replica.held)} for replica in self._replicas}

    def _next(self) -> Operation | None:
        """The fairest request of a model that somebody with a free slot serves."""
        served = {model for replica in self._replicas if replica.free > 0 for model in replica.models}
        queue = self._journal.sample_queue
        model = next((m for m in queue.children() if m in served), None)
        return queue.pop((model,)) if model is not None else None

    def _place(self, op: Operation, given: dict[Replica, list[Operation]]) -> None:
        sampler = self._journal.samplers.facts(op.lane)
        adapter, needs = sampler.adapter_ref, needed(op, sampler)
        replica = choose(self._replicas, op, adapter, needs)
        if replica is not None:
            replica.take(op, needs)
            given.setdefault(replica, []).append(op)
            return
        reasons = [replica.declined(op.id, adapter) for replica in self._replicas]
        if len(reasons) >= self._expected and all(reasons):
            self._journal.finish(Done(op.id, failure=Failure("; ".join(dict.fromkeys(map(str, reasons))), "user")))
        else:
            self._aside.append(op)

    def _begin(self, replica: Replica, taken: list[Operation]) -> None:
        now = datetime.now(UTC)
        samplers = len({op.lane for op in replica.held.values()})
        organisations = len({op.org_id for op in replica.held.values()})
        tokens = sum(op.tokens for op in replica.held.values())
        for op in taken:
            op.running = True
            op.timings.begin(Stretch(0, samplers, organisations, tokens, now))

    def _send(self, op: Operation) -> SampleOp:
        sampler = self._journal.samplers.facts(op.lane)
        return SampleOp(
            op.id,
            op.base_model,
            op.body_ref,
            samples_of(op),
            sampler.adapter_ref,
            op.session_id,
            op.org_id,
            run_id=sampler.run_id or "",
            inflight=sampler.inflight,
            version=self._journal.training.versions.get(sampler.run_id or "", 0),
            priority=int(op.plan.get("priority", INTERACTIVE) == INTERACTIVE),
            body_sha256=op.body_sha256,
        )

    def _holder(self, op: Operation) -> Replica | None:
        return next((replica for replica in self._replicas if op.id in replica.held), None)

    def _on(self, replica: Replica, message: Any) -> None:
        if isinstance(message, Done):
            replica.held.pop(message.op_id, None)
            self._journal.finish(message)
        elif isinstance(message, PullSamples):
            replica.offer(message.models, message.free_slots)
            self.wake()
        elif isinstance(message, Declined):
            self._decline(replica, message)
        elif isinstance(message, Occupancy):
            for name in _COUNTS:
                self.stats[name] += getattr(message, name)
                replica.stats[name] = replica.stats.get(name, 0) + getattr(message, name)
            self.stats["busy_s"] += message.seconds

    def _decline(self, replica: Replica, message: Declined) -> None:
        op = replica.held.pop(message.op_id, None)
        if op is None:
            return
        if message.lost:
            self._back(op)
        else:
            adapter = self._journal.samplers.facts(op.lane).adapter_ref if message.adapter else ""
            replica.decline(message.message, op.id, *filter(None, [adapter]))
            op.running = False
            op.timings.end(datetime.now(UTC))
            self._aside.append(op)
        self.wake()

    def _lost(self, replica: Replica) -> None:
        """A generator is gone: what it held goes back to the queue, for another one or for its successor."""
        self.stats["lost"] += 1
        held, replica.held = replica.held, {}
        for op in held.values():
            self._back(op)
        self.wake()

    def _back(self, op: Operation) -> None:
        """Whoever had `op` died over it."""
        op.running = False
        op.timings.end(datetime.now(UTC))
        op.attempts += 1
        if op.attempts >= LIVES:
            self._journal.finish(Done(op.id, failure=Failure(_gave_up("generator", op))))
        else:
            self._journal.queue_sample(op, lost=True)


def _gave_up(worker: str, op: Operation) -> str:
    return f"the {worker} stopped {op.attempts} times while it ran this operation; it was given up and is not billed"
