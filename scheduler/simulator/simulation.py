"""Many tenants, one cluster, a virtual clock, and the scheduler's own code between them.

`FairTree`, `Charges`, `compose` and `RunLane` are those of the service; only the machines and the clients are played.
Deterministic for a seed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from billing.tco import pool_usd, usd_per_mtok
from scheduler.charges import Charges
from scheduler.fair import FairTree, Path
from scheduler.lanes import Unit
from scheduler.simulator.cluster import Cluster
from scheduler.simulator.generators import Generators, Job
from scheduler.simulator.tenant import Tenant
from scheduler.simulator.trainer import Trainer
from scheduler.simulator.workloads import Workload


class ByArrival(FairTree[Any]):
    """First come, first served: one line for all."""

    def push(self, path: Path, item: Any, cost: int, *, weight: int = 1) -> None:
        super().push((path[0], "", "", ""), item, cost)

    def correct(self, path: Path, tokens: int) -> None:
        """Nobody is charged."""


@dataclass(frozen=True)
class Result:
    cluster: Cluster
    seconds: float
    tenants: list[Tenant]
    busy_slot_s: float
    working_s: float
    contended_s: float
    contended_slot_s: float
    trainer_busy_s: float
    sampled_tokens: int
    trained_tokens: int

    @property
    def utilisation(self) -> float:
        """The share of all slots' time that decoded something."""
        return self.busy_slot_s / (self.seconds * self.cluster.all_slots)

    @property
    def occupancy(self) -> float:
        """The share of slots busy while at least one was; what the service reports."""
        return self.busy_slot_s / (self.working_s * self.cluster.all_slots) if self.working_s else 0.0

    @property
    def backfill(self) -> float:
        """The share of slots busy while requests waited."""
        whole = self.contended_s * self.cluster.all_slots
        return self.contended_slot_s / whole if whole else 1.0

    @property
    def trainer_wait(self) -> float:
        return 1 - min(1.0, self.trainer_busy_s / self.seconds)

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
    ) -> None:
        self._cluster = cluster
        self.now_s = 0.0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self.tenants = {f"org{i}": Tenant(f"org{i}", w, Random(seed * 10_007 + i)) for i, w in enumerate(workloads)}
        charges = Charges(lambda org_id: self.tenants[org_id].workload.weight, lambda: self.now_s)
        self._train_queue: FairTree[Unit] = queue()
        self._generators = Generators(cluster, queue(), charges, self._sampled)
        self._trainer = Trainer(cluster, self._train_queue, self._trained)

    def run(self, seconds: float) -> Result:
        """All that happens in so much time, or until every tenant's loop has ended."""
        for tenant in self.tenants.values():
            self._sample(tenant)
        while True:
            self._generators.fill()
            self._trainer.fill(self.now_s)
            soonest = self._timers[0][0] if self._timers else float("inf")
            now_s = min(self._generators.next_end_s(), self._trainer.over_s, soonest)
            if now_s == float("inf"):
                return self._result(self.now_s)
            self.now_s = min(now_s, seconds)
            self._generators.advance(self.now_s)
            self._trainer.advance(self.now_s)
            while self._timers and self._timers[0][0] <= self.now_s:
                heapq.heappop(self._timers)[2]()
            if now_s >= seconds:
                return self._result(seconds)

    def _result(self, seconds: float) -> Result:
        made = self._generators
        unfinished_s = max(0.0, self._trainer.over_s - seconds) if self._trainer.over_s != float("inf") else 0.0
        return Result(
            self._cluster,
            seconds,
            list(self.tenants.values()),
            made.busy_slot_s,
            made.working_s,
            made.contended_s,
            made.contended_slot_s,
            self._trainer.busy_s - unfinished_s,
            made.sampled_tokens,
            sum(tenant.trained_tokens for tenant in self.tenants.values()),
        )

    def _after(self, delay_s: float, then: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._timers, (self.now_s + delay_s, self._number, then))

    def _sample(self, tenant: Tenant) -> None:
        while tenant.may_sample():
            for job in tenant.jobs(self.now_s):
                self._generators.push(job, tenant.workload.weight)

    def _sampled(self, job: Job, now_s: float) -> None:
        tenant = self.tenants[job.op.org_id]
        delay_s = tenant.ended(job)
        if delay_s:
            self._after(delay_s, lambda: self._came_back(tenant, job))
        else:
            self._came_back(tenant, job)

    def _came_back(self, tenant: Tenant, job: Job) -> None:
        version = tenant.version
        for unit in tenant.came_back(job, self.now_s):
            self._train_queue.push(tenant.lane.path, unit, unit.tokens, weight=tenant.workload.weight)
        if tenant.version > version:
            self._go_on(tenant)

    def _trained(self, unit: Unit, now_s: float) -> None:
        assert unit.op is not None
        tenant = self.tenants[unit.op.org_id]
        if tenant.trained(unit, now_s):
            self._go_on(tenant)

    def _go_on(self, tenant: Tenant) -> None:
        if tenant.workload.think_s:
            self._after(tenant.random.expovariate(1 / tenant.workload.think_s), lambda: self._sample(tenant))
        else:
            self._sample(tenant)
