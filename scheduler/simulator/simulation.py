"""Many tenants, one cluster, a virtual clock, and the scheduler's own code between them.

`LocalQueue`, `ExpectedCosts`, `hand_out`, `compose` and `RunLane` are those of the service; only the machines and the
clients are played. Deterministic for a seed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from billing.reports.tco import pool_usd, usd_per_mtok
from scheduler.links.contract import Path
from scheduler.order.expected_cost import ExpectedCosts
from scheduler.order.fair import FairTree
from scheduler.order.lanes import Unit
from scheduler.order.light_work import SizesOf, cost_of, unknown_sizes
from scheduler.order.operations import Operation
from scheduler.simulator.cluster import Cluster
from scheduler.simulator.generators import Counts, Generators
from scheduler.simulator.slots import Job
from scheduler.simulator.tenant import Tenant
from scheduler.simulator.trainer import Trainers, Work
from scheduler.simulator.workloads import Workload


class ByArrival(FairTree[Any]):
    """First come, first served: one queue for all."""

    def push(self, path: Path, item: Any, cost: int, *, weight: int = 1) -> None:
        super().push((path[0], "", "", ""), item, cost)

    def correct(self, path: Path, tokens: int) -> None:
        """Does nothing: no flow is charged."""


@dataclass(frozen=True)
class Result:
    """The counts of the last `seconds` of a simulation. `steps` are the generators' decode steps, `slot_steps` the busy
    slots in them."""

    cluster: Cluster
    seconds: float
    tenants: list[Tenant]
    generators: Counts
    steps: float
    slot_steps: float
    trainers: Work

    @property
    def sampled_tokens(self) -> int:
        return self.generators.sampled_tokens

    @property
    def trained_tokens(self) -> int:
        return sum(tenant.trained_tokens for tenant in self.tenants)

    @property
    def half_way_tokens(self) -> int:
        """Tokens sampled for steps that were not over at the end of the time."""
        return sum(tenant.half_way_tokens for tenant in self.tenants)

    @property
    def utilisation(self) -> float:
        """The share of all slots' time that decoded something."""
        return self.generators.busy_slot_s / (self.seconds * self.cluster.all_slots)

    @property
    def occupancy(self) -> float:
        """The share of slots busy in all decode steps; what the service reports."""
        return self.slot_steps / (self.steps * self.cluster.slots) if self.steps else 0.0

    @property
    def backfill(self) -> float:
        """The share of slots busy while requests waited."""
        whole = self.generators.contended_s * self.cluster.all_slots
        return self.generators.contended_slot_s / whole if whole else 1.0

    @property
    def trainer_wait(self) -> float:
        """The share of all trainers' time in which they computed nothing."""
        return 1 - self.trainers.seconds / (self.seconds * self.cluster.trainers)

    @property
    def usd_per_mtok(self) -> float:
        """The cluster's price per million tokens, sampled and trained: what is half-way counts too."""
        return usd_per_mtok(
            pool_usd(self.cluster.gpu_hour_usd, self.cluster.gpus, self.seconds),
            self.sampled_tokens + self.trained_tokens,
        )

    def waits_s(self, name: str | None = None) -> list[float]:
        """How long requests queued, of all tenants or those of one workload; sorted."""
        return sorted(w for t in self.tenants if name in (None, t.workload.name) for w in t.waits_s)


class Simulation:
    def __init__(
        self,
        cluster: Cluster,
        workloads: Sequence[Workload],
        *,
        queue: Callable[[], FairTree[Any]] = FairTree,
        seed: int = 0,
        sizes: SizesOf = unknown_sizes,
    ) -> None:
        """`sizes`: the sizes of runs, by which their steps and saves are weighed."""
        self._cluster, self._sizes = cluster, sizes
        self.now_s = 0.0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._front_free_s = 0.0
        self.tenants = {
            f"org{i}": Tenant(f"org{i}", work, Random(seed * 10_007 + i), cluster.slice_tokens)
            for i, work in enumerate(workloads)
        }
        costs = ExpectedCosts(lambda org_id: self.tenants[org_id].workload.weight, lambda: self.now_s)
        self._train_queue: FairTree[Unit] = queue()
        fair = queue is not ByArrival
        self._generators = Generators(cluster, queue(), costs, self._sampled, yields=fair)
        lanes = [tenant.lane for tenant in self.tenants.values()]
        paths = {lane.run_id: lane.path for lane in lanes} if fair else {}
        self._trainers = Trainers(cluster, self._train_queue, paths, self._pairs_of, self._cost_of, self._trained)

    def run(self, seconds: float, after_s: float = 0.0) -> Result:
        """Simulate `seconds`, after `after_s` that are not counted, or until every tenant's loop has ended."""
        for tenant in self.tenants.values():
            self._at(tenant.workload.begins_s, partial(self._sample, tenant))
        self._play(after_s)
        self._trainers.done = Work()
        self._generators.counts = Counts()
        for tenant in self.tenants.values():
            tenant.forget()
        began_s, (steps, slot_steps) = self.now_s, self._generators.steps
        self._play(after_s + seconds)
        now_steps, now_slot_steps = self._generators.steps
        return Result(
            self._cluster,
            self.now_s - began_s,
            list(self.tenants.values()),
            self._generators.counts,
            now_steps - steps,
            now_slot_steps - slot_steps,
            self._trainers.done,
        )

    def _play(self, until_s: float) -> None:
        while self.now_s < until_s:
            self._generators.fill()
            self._trainers.fill(self.now_s)
            soonest = self._timers[0][0] if self._timers else float("inf")
            next_s = min(self._generators.next_s, self._trainers.over_s, soonest)
            if next_s == float("inf"):
                return
            self.now_s = min(next_s, until_s)
            self._generators.advance(self.now_s)
            self._trainers.advance(self.now_s)
            while self._timers and self._timers[0][0] <= self.now_s:
                heapq.heappop(self._timers)[2]()

    def _at(self, time_s: float, then: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._timers, (time_s, self._number, then))

    def _sample(self, tenant: Tenant) -> None:
        """Send the requests of every step that may begin."""
        while tenant.may_sample():
            for job in tenant.jobs():
                self._through_front(partial(self._arrived, tenant, job))

    def _arrived(self, tenant: Tenant, job: Job) -> None:
        job.pushed_s = self.now_s
        if tenant.workload.samples:
            self._generators.push(job, tenant.workload.weight)
        else:
            self._came_back(tenant, job)

    def _sampled(self, job: Job, now_s: float) -> None:
        tenant = self.tenants[job.op.org_id]
        came_back = partial(self._came_back, tenant, job)
        delay_s = tenant.ended(job)
        if delay_s:
            self._at(now_s + delay_s, came_back)
        else:
            self._through_front(came_back)

    def _through_front(self, then: Callable[[], None]) -> None:
        """A request's way to the server, or its answer's way back: one after the other."""
        if not self._cluster.front_s:
            then()
            return
        self._front_free_s = max(self.now_s, self._front_free_s) + self._cluster.front_s / 2
        self._at(self._front_free_s, then)

    def _came_back(self, tenant: Tenant, job: Job) -> None:
        version = tenant.version
        for op in tenant.came_back(job, self.now_s):
            tenant.sends_s = max(tenant.sends_s, self.now_s)
            if tenant.sends_s == self.now_s:
                self._comes(tenant, op)
            else:
                self._at(tenant.sends_s, partial(self._comes, tenant, op))
            tenant.sends_s += self._cluster.request_s
        if tenant.version > version:
            self._go_on(tenant)

    def _comes(self, tenant: Tenant, op: Operation) -> None:
        """An operation arrives at the trainer."""
        for unit in tenant.lane.arrive(op):
            self._train_queue.push(tenant.lane.path, unit, self._cost_of(unit), weight=tenant.workload.weight)
        self._trainers.asked([tenant.lane.run_id])

    def _pairs_of(self, unit: Unit) -> int:
        assert unit.op is not None
        return self.tenants[unit.op.org_id].pairs_of(unit)

    def _cost_of(self, unit: Unit) -> int:
        """How many tokens a unit counts as."""
        spec = self.tenants[unit.send.run_id].lane.spec
        return cost_of(unit, spec, self._sizes(spec))

    def _trained(self, unit: Unit, now_s: float) -> None:
        assert unit.op is not None
        tenant = self.tenants[unit.op.org_id]
        if tenant.trained(unit, now_s):
            self._go_on(tenant)

    def _go_on(self, tenant: Tenant) -> None:
        think_s = tenant.workload.think_s and tenant.random.expovariate(1 / tenant.workload.think_s)
        self._at(self.now_s + self._cluster.turnaround_s + think_s, partial(self._sample, tenant))
