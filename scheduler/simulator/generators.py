"""The generators of a simulation: requests wait in the fair queue, and are handed out as the desk does it."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.dispatch.handing_out import announce, hand_out
from scheduler.links.contract import Item, Lease
from scheduler.order.expected_cost import ExpectedCosts
from scheduler.order.fair import FairTree
from scheduler.order.local_queue import LocalQueue
from scheduler.simulator.cluster import Cluster
from scheduler.simulator.slots import Job, Slots


@dataclass
class Counts:
    """Seconds, or slot-seconds in `*_slot_s`. `contended_*` count only while requests wait."""

    busy_slot_s: float = 0.0
    contended_s: float = 0.0
    contended_slot_s: float = 0.0
    sampled_tokens: int = 0


class Generators:
    def __init__(
        self,
        cluster: Cluster,
        tree: FairTree[str],
        costs: ExpectedCosts,
        done: Callable[[Job, float], None],
        *,
        yields: bool,
    ) -> None:
        self._queue = LocalQueue(lambda: self._at_s, tree)
        self._costs = costs
        self._done = done
        self._jobs: dict[str, Job] = {}  # waiting in the queue
        self._slots = {f"{i}": Slots(f"{i}", cluster, yields) for i in range(cluster.replicas)}
        self._open = dict.fromkeys(self._slots)
        # by generator: slots have come free that the queue does not know of
        self._unannounced = dict.fromkeys(self._slots)
        self._events: list[tuple[float, str]] = []  # heap; entries that differ from `_next` are void
        self._next: dict[str, float] = {}
        self._at_s = 0.0
        self._busy = 0
        self.counts = Counts()

    def push(self, job: Job, weight: int) -> None:
        op = job.op
        op.charged = self._costs.expected(op)
        self._jobs[op.id] = job
        self._queue.push(Item(op.id, op.path, op.charged, slots=len(job.lengths), weight=weight, adapter=job.needs))

    @property
    def next_s(self) -> float:
        """When the next sequence begins or ends."""
        while self._events and self._next[self._events[0][1]] != self._events[0][0]:
            heapq.heappop(self._events)
        return self._events[0][0] if self._events else float("inf")

    def advance(self, now_s: float) -> None:
        """Decode until `now_s`, which is not after `next_s`."""
        span, self._at_s = now_s - self._at_s, now_s
        self.counts.busy_slot_s += span * self._busy
        if self._jobs:
            self.counts.contended_s += span
            self.counts.contended_slot_s += span * self._busy
        while self.next_s <= now_s:
            self._visit(heapq.heappop(self._events)[1])

    def fill(self) -> None:
        """Give every slot that is free, or that is made free, a sequence, the fairest request's first."""
        if not self._open or not self._jobs:
            return
        for name in self._unannounced:
            announce(self._queue, self._slots[name].offer)
        self._unannounced.clear()
        hand_out(self._queue, [self._slots[name].offer for name in self._open], self._take)

    def _take(self, name: str, lease: Lease) -> None:
        self._visit(name, self._jobs.pop(lease.id))

    @property
    def steps(self) -> tuple[float, float]:
        """Decode steps of all generators, and the busy slots in them."""
        return sum(slots.steps for slots in self._slots.values()), sum(s.slot_steps for s in self._slots.values())

    def _visit(self, name: str, job: Job | None = None) -> None:
        """Bring one generator to the present, and give it a request."""
        slots = self._slots[name]
        self._busy -= slots.busy
        ended = slots.advance(self._at_s)
        if job is not None:
            slots.take(job)
        self._busy += slots.busy
        self._next[name] = slots.next_s
        heapq.heappush(self._events, (slots.next_s, name))
        self._unannounced[name] = None
        if slots.offer.open:
            self._open[name] = None
        else:
            self._open.pop(name, None)
        for job in ended:
            self._end(job)

    def _end(self, job: Job) -> None:
        facts = {"prefill": job.op.sample.prompt_tokens, "sample": sum(job.lengths)}
        self.counts.sampled_tokens += facts["sample"]
        self._queue.forget(job.op.id)
        self._queue.correct(job.op.path, self._costs.ended(job.op, facts))
        self._done(job, self._at_s)
