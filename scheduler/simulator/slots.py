"""One simulated generator: its slots, and the sequences in them.

All of its sequences advance at one speed, which depends on how many there are, so each ends when the common count of
decode steps has passed its own length. Only beginnings and ends are events; tokens are not. When no slot is free, it
sets sequences aside for tenants that have few, as a generator does (`workers/generator/requests/seating.py`).
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
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

    @property
    def tenant(self) -> str:
        return self.op.org_id


class Slots:
    """The sequences in the slots. Nothing begins or ends before `next_s`. `offer` is what the queue knows of this
    generator."""

    def __init__(self, name: str, cluster: Cluster, yields: bool) -> None:
        """`yields`: whether it sets sequences aside."""
        self.offer = Offer(name, [MODEL], cluster.slots)
        self.steps = 0.0
        self.slot_steps = 0.0
        self._cluster, self._yields = cluster, yields
        self._at_s = 0.0
        self._number = 0
        self._running: list[tuple[float, int, Job]] = []  # heap by the step at which a sequence ends
        self._coming: deque[tuple[float, int, Job]] = deque()  # sequences that have a slot and begin at that time
        self._behind: deque[tuple[int, Job]] = deque()  # sequences of a request for which too few slots were free
        self._aside: list[tuple[float, int, Job]] = []  # sequences set aside, each with the steps that it still needs
        self._rows = Counter[str]()  # slots by tenant

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
        for length in job.lengths:
            if self._rows.total() < self._cluster.slots or (self._yields and self._make_room(job.tenant)):
                self._rows[job.tenant] += 1
                self._coming.append((self._at_s + self._cluster.handover_s, length, job))
            else:
                self._behind.append((length, job))
        self._begin_due()
        self._count_yields()

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
            self._rows[job.tenant] -= 1
            job.left -= 1
            if job.left == 0:
                ended.append(job)
                self.offer.busy -= len(job.lengths)
            self._pass_on(job)
        self._begin_due()
        self.offer.free = 0 if self._aside else self._cluster.slots - self._rows.total() - len(self._behind)
        self._count_yields()
        return ended

    def _count_yields(self) -> None:
        tenants = (+self._rows).keys() | {job.tenant for _, job in self._behind}
        over = self._rows.total() - len(tenants) if self._yields else 0
        self.offer.yields = max(0, min(over, self._cluster.slots - len(self._aside)))

    def _make_room(self, tenant: str) -> bool:
        """Set the youngest sequence aside of the tenant that has most slots, if that is at least two more."""
        most = max(self._rows.values())
        if most < self._rows[tenant] + 2:
            return False
        places = [i for i, (_, _, job) in enumerate(self._running) if self._rows[job.tenant] == most]
        if not places:  # all of them are still coming
            return False
        place = max(places, key=lambda i: self._running[i][1])
        end, number, job = self._running[place]
        self._running[place] = self._running[-1]
        self._running.pop()
        heapq.heapify(self._running)
        self._rows[job.tenant] -= 1
        self._aside.append((end - self.steps, number, job))
        return True

    def _pass_on(self, job: Job) -> None:
        """Give a slot that has come free to the next of its request, else to what was set aside, else to others."""
        behind = next((i for i, (_, other) in enumerate(self._behind) if other is job), 0)
        if self._aside and (not self._behind or self._behind[behind][1] is not job):
            first = min(self._aside, key=lambda one: (self._rows[one[2].tenant], one[1]))
            self._aside.remove(first)
            left, number, other = first
            self._rows[other.tenant] += 1
            heapq.heappush(self._running, (self.steps + left, number, other))
        elif self._behind:
            length, other = self._behind[behind]
            del self._behind[behind]
            self._rows[other.tenant] += 1
            self._begin(length, other)

    def _begin_due(self) -> None:
        while self._coming and self._coming[0][0] <= self._at_s + 1e-9:
            self._begin(*self._coming.popleft()[1:])

    def _begin(self, length: int, job: Job) -> None:
        prompt = job.op.sample.prompt_tokens / self._cluster.prefill_speed
        self._number += 1
        heapq.heappush(self._running, (self.steps + prompt + length, self._number, job))
