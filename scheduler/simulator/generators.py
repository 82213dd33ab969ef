"""The generators of a simulation: slots that the fair queue fills the moment they come free.

All sequences advance at one speed, which depends on how many there are, so each ends when the common count of decoded
tokens has passed its own length. Only the ends are events; tokens are not.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.charges import Charges
from scheduler.fair import FairTree
from scheduler.operations import Operation
from scheduler.simulator.cluster import Cluster


@dataclass
class Job:
    """A request for a group, from the queue to its last token."""

    op: Operation
    lengths: list[int]
    pushed_s: float
    left: int = 0
    started_s: float = -1.0


class Generators:
    def __init__(
        self, cluster: Cluster, queue: FairTree[Operation], charges: Charges, done: Callable[[Job, float], None]
    ) -> None:
        self._cluster = cluster
        self._queue = queue
        self._charges = charges
        self._done = done
        self._jobs: dict[str, Job] = {}
        self._running: list[tuple[float, int, Job]] = []  # heap by the count at which a sequence ends
        self._behind: deque[tuple[int, Job]] = deque()  # sequences of a group that was taken with too few slots free
        self._decoded = 0.0
        self._at_s = 0.0
        self._number = 0
        self.queued = 0
        self.busy_slot_s = 0.0
        self.working_s = 0.0
        self.contended_s = 0.0  # while requests wait
        self.contended_slot_s = 0.0
        self.sampled_tokens = 0

    def push(self, job: Job, weight: int) -> None:
        op = job.op
        op.charged = self._charges.expected(op)
        self._jobs[op.id] = job
        self._queue.push(op.path, op, op.charged, weight=weight)
        self.queued += 1

    def next_end_s(self) -> float:
        if not self._running:
            return float("inf")
        left = max(0.0, self._running[0][0] - self._decoded)
        return self._at_s + left / self._cluster.tokens_per_s(len(self._running))

    def advance(self, now_s: float) -> None:
        """Decode until `now_s`."""
        span, busy = now_s - self._at_s, len(self._running)
        if busy:
            self._decoded += span * self._cluster.tokens_per_s(busy)
            self.working_s += span
            self.busy_slot_s += span * busy
        if self.queued:
            self.contended_s += span
            self.contended_slot_s += span * busy
        self._at_s = now_s
        while self._running and self._running[0][0] <= self._decoded + 1e-6:
            self._end(heapq.heappop(self._running)[2], now_s)

    def fill(self) -> None:
        """Give every free slot a sequence, the fairest request's first."""
        while len(self._running) < self._cluster.all_slots:
            if self._behind:
                self._start(*self._behind.popleft())
                continue
            model = next(iter(self._queue.children()), None)
            op = self._queue.pop((model,)) if model is not None else None
            if op is None:
                return
            self.queued -= 1
            job = self._jobs.pop(op.id)
            job.left, job.started_s = len(job.lengths), self._at_s
            self._behind.extend((length, job) for length in job.lengths)

    def _start(self, length: int, job: Job) -> None:
        prompt = int(job.op.plan["prompt_tokens"]) / self._cluster.prefill_speed
        self._number += 1
        heapq.heappush(self._running, (self._decoded + prompt + length, self._number, job))

    def _end(self, job: Job, now_s: float) -> None:
        job.left -= 1
        if job.left == 0:
            facts = {"prefill": int(job.op.plan["prompt_tokens"]), "sample": sum(job.lengths)}
            self.sampled_tokens += facts["sample"]
            self._queue.correct(job.op.path, self._charges.ended(job.op, facts))
            self._done(job, now_s)
