"""One simulated generator: its slots, and the sequences in them.

All of its sequences advance at one speed, which depends on how many there are, so each ends when the common count of
decode steps has passed its own length. Only beginnings and ends are events; tokens are not.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from scheduler.dispatch.handing_out import Offer
from scheduler.order.operations import Operation
from scheduler.simulator.cluster import Cluster

#: The one base model of all tenants.
MODEL = "model"


@dataclass(eq=False)
class Job:
    """A request for a group, from the queue to its last token. `batch` is the number of its tenant's batch; `needs`
    names what a generator holds once it has served it."""

    op: Operation
    lengths: list[int]
    batch: int
    needs: str
    pushed_s: float = 0.0
    left: int = 0
    started_s: float = -1.0


class Slots:
    """The sequences in the slots. Nothing begins or ends before `next_s`. `offer` is what the queue knows of this
    generator."""

    def __init__(self, name: str, cluster: Cluster) -> None:
        self.offer = Offer(name, [MODEL], cluster.slots)
        self.steps = 0.0
        self.slot_steps = 0.0
        self._cluster = cluster
        self._at_s = 0.0
        self._number = 0
        self._running: list[tuple[float, int, Job]] = []  # heap by the step at which a sequence ends
        self._coming: deque[tuple[float, int, Job]] = deque()  # sequences that have a slot and begin at that time
        self._behind: deque[tuple[int, Job]] = deque()  # sequences of a request for which too few slots were free

    @property
    def busy(self) -> int:
        return len(self._running)

    @property
    def next_s(self) -> float:
        """When the next sequence begins or ends."""
        begins_s = self._coming[0][0] if self._coming else float("inf")
        if not self._running:
            return begins_s
        left = max(0.0, self._running[0][0] - self.steps)
        return min(begins_s, self._at_s + left * self._cluster.step_s(self.busy))

    def take(self, job: Job) -> None:
        """A request arrives. It takes the free slots at once, and begins to decode after `handover_s`."""
        job.left, job.started_s = len(job.lengths), self._at_s
        self.offer.free -= len(job.lengths)
        self.offer.busy += len(job.lengths)
        taken = len(self._running) + len(self._coming)
        room = max(0, self._cluster.slots - taken)
        for length in job.lengths[:room]:
            self._coming.append((self._at_s + self._cluster.handover_s, length, job))
        self._behind.extend((length, job) for length in job.lengths[room:])
        self._begin_due()

    def advance(self, now_s: float) -> list[Job]:
        """Decode until `now_s`. Returns the requests that ended there."""
        if self._running:
            steps = (now_s - self._at_s) / self._cluster.step_s(self.busy)
            self.steps += steps
            self.slot_steps += steps * self.busy
        self._at_s = now_s
        ended = []
        while self._running and self._running[0][0] <= self.steps + 1e-6:
            job = heapq.heappop(self._running)[2]
            job.left -= 1
            if job.left == 0:
                ended.append(job)
                self.offer.busy -= len(job.lengths)
            if self._behind:
                self._begin(*self._behind.popleft())
        self._begin_due()
        self.offer.free = self._cluster.slots - len(self._running) - len(self._coming) - len(self._behind)
        return ended

    def _begin_due(self) -> None:
        while self._coming and self._coming[0][0] <= self._at_s + 1e-9:
            self._begin(*self._coming.popleft()[1:])

    def _begin(self, length: int, job: Job) -> None:
        prompt = job.op.sample.prompt_tokens / self._cluster.prefill_speed
        self._number += 1
        heapq.heappush(self._running, (self.steps + prompt + length, self._number, job))
