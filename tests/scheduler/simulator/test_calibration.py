"""A machine that is known, played and measured: calibration finds what it is."""

from __future__ import annotations

import pytest

from scheduler.simulator.calibration import Batch, calibrate
from scheduler.simulator.cluster import Cluster
from scheduler.simulator.simulation import Simulation
from scheduler.simulator.workloads import Workload

SLOTS = 8


def timed(machine: Cluster, lengths: list[int]) -> Batch:
    """A batch on the machine, as a client would time it: it also waits for the client's own turnaround."""
    load = Workload("batch", len(lengths), 1, prompt=0, lengths=lengths, trains=False, steps=1)
    result = Simulation(machine, [load]).run(float("inf"))
    return Batch(lengths, result.seconds, round(result.steps))


@pytest.mark.parametrize("handover_s", [0.0, 0.02])
@pytest.mark.parametrize("front_s", [0.001, 0.01])
def test_a_known_machine_is_found(handover_s: float, front_s: float) -> None:
    machine = Cluster(
        replicas=1, gpus_per_replica=1, slots=SLOTS, decode_s=0.003, decode_s_per_sequence=0.0005,
        prefill_speed=float("inf"), handover_s=handover_s, front_s=front_s, turnaround_s=0.01, ranks=1,
    )  # fmt: skip
    found = calibrate(
        SLOTS,
        one=timed(machine, [400]),
        full=timed(machine, [400] * SLOTS),
        lone=timed(machine, [0]),
        burst=timed(machine, [0] * SLOTS),
        queued=timed(machine, [16 + i % 32 for i in range(16 * SLOTS)]),
    )
    assert found.step_s(1) == pytest.approx(machine.step_s(1), rel=0.02)
    assert found.step_s(SLOTS) == pytest.approx(machine.step_s(SLOTS), rel=0.1)
    assert found.front_s == pytest.approx(front_s, rel=0.5)
    assert found.handover_s == pytest.approx(handover_s, abs=0.002)
    load = Workload("other", 4, 1, prompt=0, mean_tokens=25, sigma=0.8, max_tokens=120, trains=False)
    truth, prediction = (Simulation(each, [load] * 3).run(300.0).occupancy for each in (machine, found))
    assert prediction == pytest.approx(truth, rel=0.05)
