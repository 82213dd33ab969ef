"""The simulator checked against the service: a measured run of sampling loops, played again on the virtual clock.

What was measured says how long a decode step took and which slots were busy; the simulation is given the steps' time,
the slots and what each tenant asked for, and must find the occupancy by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scheduler.simulator.cluster import Cluster
from scheduler.simulator.simulation import Result, Simulation
from scheduler.simulator.workloads import Workload


@dataclass(frozen=True)
class Measured:
    """A run of the embedded service, from its /api/v1/weft/stats before and after."""

    slots: int
    steps: int
    slots_busy: int
    slots_offered: int
    busy_s: float

    @classmethod
    def between(cls, slots: int, before: dict[str, Any], after: dict[str, Any]) -> Measured:
        """From the `generator` part of two answers."""
        names = ("steps", "slots_busy", "slots_offered", "busy_s")
        return cls(slots, *(after[name] - before[name] for name in names))

    @property
    def occupancy(self) -> float:
        return self.slots_busy / self.slots_offered

    @property
    def step_s(self) -> float:
        return self.busy_s / self.steps


def replay(measured: Measured, workloads: Sequence[Workload]) -> Result:
    """The same loops on the same slots. Each workload must end (`steps`)."""
    if not all(workload.steps for workload in workloads):
        raise ValueError("replay: every workload needs a number of steps, or the run has no end")
    cluster = Cluster(
        replicas=1,
        gpus_per_replica=1,
        slots=measured.slots,
        decode_s=measured.step_s,
        decode_s_per_sequence=0.0,
        prefill_speed=1e9,  # prompts are in the steps' time
        trainer_gpus=1,
    )
    return Simulation(cluster, workloads).run(float("inf"))
