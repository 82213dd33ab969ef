"""Calibration finds the properties of a known machine, which is played and measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from scheduler.simulator.calibration import Batch, calibrate, calibrate_trainer, non_negative
from scheduler.simulator.cluster import Cluster
from scheduler.simulator.simulation import Simulation
from scheduler.simulator.trainer import Work
from scheduler.simulator.workloads import Workload

SLOTS = 8


def timed(machine: Cluster, lengths: list[int]) -> Batch:
    """The time of a batch on the machine as a client measures it, with the client's own turnaround."""
    load = Workload("batch", len(lengths), 1, prompt=0, lengths=lengths, trains=False, steps=1)
    result = Simulation(machine, [load]).run(float("inf"))
    return Batch(lengths, result.seconds, round(result.steps))


@pytest.mark.parametrize(("handover_s", "front_s"), [(0.0, 0.001), (0.02, 0.01)])
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
    truth, prediction = (Simulation(each, [load] * 3).run(60.0).occupancy for each in (machine, found))
    assert prediction == pytest.approx(truth, rel=0.05)


#: Stages, slices, steps, tokens and pairs of six loads.
WORKS = [(100, 100, 100, 3200, 102_400), (100, 180, 170, 11_520, 737_280), (60, 300, 240, 19_200, 1_228_800),
         (60, 400, 100, 25_600, 1_638_400), (50, 100, 100, 102_400, 13_107_200),
         (50, 100, 100, 102_400, 104_857_600)]  # fmt: skip
TIMES = {"pass_s": 0.012, "slice_s": 0.0015, "light_s": 0.0008, "pair_s": 5e-8}


def works(machine: Cluster, noise: float = 0.0) -> list[Work]:
    """The machine's times for the loads; every other one is measured too long, and those between too short."""
    told = [(Work(counts[0], *counts), 1 + noise * (-1) ** place) for place, counts in enumerate(WORKS)]
    rate = machine.trained_tokens_per_s_per_gpu
    return [
        replace(work, seconds=off * (
            work.stages * machine.pass_s + work.slices * machine.slice_s + work.light * machine.light_s
            + work.tokens / rate + work.pairs * machine.pair_s
        ))
        for work, off in told
    ]  # fmt: skip


@pytest.mark.parametrize("none", [None, *TIMES])
def test_what_a_pass_takes_is_found(none: str | None) -> None:
    times = {**TIMES, **({none: 0.0} if none else {})}
    machine = Cluster(trainers=2, ranks=1, trained_tokens_per_s_per_gpu=10_000.0, **times)
    found = calibrate_trainer(replace(Cluster(), trainers=2), works(machine))
    assert found.trained_tokens_per_s_per_gpu == pytest.approx(10_000)
    assert {name: getattr(found, name) for name in times} == pytest.approx(times, abs=1e-12)
    assert (found.trainers, found.ranks) == (2, 1)


def test_a_disturbed_measurement_makes_no_time_negative_and_keeps_to_the_loads() -> None:
    machine = Cluster(ranks=1, trained_tokens_per_s_per_gpu=10_000.0, **TIMES)
    for noise in (-0.05, 0.05):
        found = calibrate_trainer(machine, works(machine, noise))
        assert min(found.pass_s, found.slice_s, found.light_s) >= 0
        for true, again in zip(works(machine), works(found), strict=True):
            assert again.seconds == pytest.approx(true.seconds, rel=0.06)


def test_loads_that_are_alike_are_refused() -> None:
    machine = Cluster(ranks=1, trained_tokens_per_s_per_gpu=10_000.0, **TIMES)
    alike = [replace(work, slices=work.stages, light=work.stages) for work in works(machine)]
    with pytest.raises(ValueError, match="differ too little"):
        calibrate_trainer(machine, alike)
    with pytest.raises(ValueError, match="differ too little"):
        calibrate_trainer(machine, works(machine)[:4])
    with pytest.raises(ValueError, match="differ too little"):
        calibrate_trainer(machine, [replace(work, pairs=64 * work.tokens) for work in works(machine)])
    with pytest.raises(ValueError, match="no time"):
        calibrate_trainer(machine, [*works(machine), Work()])


@given(st.lists(st.lists(st.floats(-4, 4), min_size=4, max_size=4), min_size=3, max_size=8))
def test_least_squares_without_negative_terms_keep_the_conditions_of_kuhn_and_tucker(told: list[list[float]]) -> None:
    """x >= 0; no step that is allowed is downhill: the slope is 0 where x > 0, and not below 0 where x = 0."""
    rows, values = np.array(told)[:, :3], np.array(told)[:, 3]
    found = non_negative(rows, values)
    slope = rows.T @ (rows @ found - values)
    assert (found >= 0).all()
    assert (slope >= -1e-6 * (1 + np.abs(rows).max() * np.abs(values).max())).all()
    assert np.abs(slope * np.minimum(found, 1)).max() <= 1e-6 * (1 + np.abs(rows).max() * np.abs(values).max())
