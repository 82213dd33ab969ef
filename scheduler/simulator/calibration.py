"""The simulator's machines as a real service has them: measured on a few batches, apart from what it then predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from scheduler.simulator.cluster import Cluster
from scheduler.simulator.simulation import Simulation
from scheduler.simulator.workloads import Workload

#: Halvings in the search for the time of a handover: to a thousandth of a decode step.
_HALVINGS = 15
#: The longest handover that is looked for, in decode steps.
_MOST_STEPS = 32


@dataclass(frozen=True)
class Batch:
    """Requests of one sequence each, sent at once and waited for: their `lengths` in decode steps, the `seconds` until
    the last answer was there, and the `steps` of the generator meanwhile."""

    lengths: Sequence[int]
    seconds: float
    steps: int


def calibrate(slots: int, one: Batch, full: Batch, lone: Batch, burst: Batch, queued: Batch) -> Cluster:
    """One generator of `slots`, its front and a client, from `one` long sequence and `full` slots of them; a `lone`
    request that decodes nothing and a `burst` of those, no more than there are slots; and `queued`, of many times as
    many as there are slots, whose ends do not coincide."""
    front_s = max(0.0, burst.seconds - lone.seconds) / (len(burst.lengths) - 1)
    one_s = (one.seconds - lone.seconds) / one.steps
    full_s = (full.seconds - lone.seconds - (slots - 1) * front_s) / full.steps
    each_s = max(0.0, full_s - one_s) / (slots - 1)
    machine = Cluster(
        replicas=1,
        gpus_per_replica=1,
        slots=slots,
        decode_s=one_s - each_s,
        decode_s_per_sequence=each_s,
        prefill_speed=float("inf"),  # prompts are short, and in the front's time
        front_s=front_s,
        ranks=1,
    )
    machine = replace(machine, handover_s=_handover_s(machine, queued))
    return replace(machine, turnaround_s=max(0.0, lone.seconds - front_s - machine.handover_s))


def _handover_s(machine: Cluster, queued: Batch) -> float:
    """With which the batch takes as many decode steps as it did."""
    load = Workload("queued", len(queued.lengths), 1, prompt=0, lengths=queued.lengths, trains=False, steps=1)
    low_s, high_s = 0.0, _MOST_STEPS * machine.step_s(machine.slots)
    for _ in range(_HALVINGS):
        tried_s = (low_s + high_s) / 2
        steps = Simulation(replace(machine, handover_s=tried_s), [load]).run(float("inf")).steps
        low_s, high_s = (tried_s, high_s) if steps < queued.steps else (low_s, tried_s)
    return low_s
