"""The simulated machines with the speeds of a real service, measured on a few loads, which are not those that it then
predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from scheduler.simulator.cluster import Cluster
from scheduler.simulator.simulation import Simulation
from scheduler.simulator.trainer import Work
from scheduler.simulator.workloads import Workload

#: Number of halvings in the search for the handover time: exact to a thousandth of a decode step.
_HALVINGS = 15
#: The longest handover that the search considers, in decode steps.
_MOST_STEPS = 32
#: The largest accepted condition number of the loads that calibrate a trainer (each column of length 1): beyond it
#: errors of a hundredth in the measurements become as large as the terms.
_MOST_ALIKE = 100

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Batch:
    """Requests of one sequence each, sent at once and waited for: their `lengths` in decode steps, the `seconds` until
    the last answer came, and the generator's decode `steps` in that time."""

    lengths: Sequence[int]
    seconds: float
    steps: int


def calibrate(slots: int, one: Batch, full: Batch, lone: Batch, burst: Batch, queued: Batch) -> Cluster:
    """The machine that behaves as measured: one generator of `slots`, its front, and a client. Measured are `one` long
    sequence and `full` slots of them; a `lone` request that decodes nothing, and a `burst` of those, at most as many as
    there are slots; and `queued` requests, many times as many as there are slots, which end at different times."""
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
        prefill_speed=float("inf"),  # prompts are short, and their time is part of the front's
        front_s=front_s,
        ranks=1,
    )
    machine = replace(machine, handover_s=_handover_s(machine, queued))
    return replace(machine, turnaround_s=max(0.0, lone.seconds - front_s - machine.handover_s))


def _handover_s(machine: Cluster, queued: Batch) -> float:
    """The handover time with which the simulated batch takes as many decode steps as the real one."""
    load = Workload("queued", len(queued.lengths), 1, prompt=0, lengths=queued.lengths, trains=False, steps=1)
    low_s, high_s = 0.0, _MOST_STEPS * machine.step_s(machine.slots)
    for _ in range(_HALVINGS):
        tried_s = (low_s + high_s) / 2
        steps = Simulation(replace(machine, handover_s=tried_s), [load]).run(float("inf")).steps
        low_s, high_s = (tried_s, high_s) if steps < queued.steps else (low_s, tried_s)
    return low_s


def calibrate_trainer(machine: Cluster, loads: Sequence[Work]) -> Cluster:
    """`machine` with trainers of one rank that take about the measured time for these loads. It finds the times of a
    stage, a slice, a piece of light work, a token and a pair of tokens, none below 0, with the least sum of squared
    relative errors. ValueError if the loads are too much alike to tell the five apart, or one took no time."""
    if not all(load.seconds > 0 for load in loads):
        raise ValueError("a load that calibrates has taken no time: measure it for longer")
    each = np.array([(load.stages, load.slices, load.light, load.tokens, load.pairs) for load in loads])
    relative = each / np.array([load.seconds for load in loads])[:, None]
    scaled = relative / np.linalg.norm(relative, axis=0).clip(min=1e-300)
    if len(loads) < each.shape[1] or np.linalg.cond(scaled) > _MOST_ALIKE:
        raise ValueError(
            "the loads differ too little in stages, slices, steps, tokens and lengths to tell what each takes"
        )
    pass_s, slice_s, light_s, token_s, pair_s = non_negative(relative, np.ones(len(loads))).tolist()
    if token_s == 0:
        raise ValueError("the time of a pass does not grow with its tokens: measure larger loads, or undisturbed")
    machine = replace(machine, ranks=1, gather_s=0.0, trained_tokens_per_s_per_gpu=1 / token_s)
    return replace(machine, pass_s=pass_s, slice_s=slice_s, light_s=light_s, pair_s=pair_s)


def non_negative(rows: Array, values: Array) -> Array:
    """The x, none below 0, with the least |rows x - values|. It solves least squares for each choice of terms that may
    differ from 0, and takes the best solution without a negative term. For few terms: there are 2^terms choices."""
    best, least = np.zeros(rows.shape[1]), float(np.sum(values**2))
    for count in range(1, rows.shape[1] + 1):
        for kept in map(list, combinations(range(rows.shape[1]), count)):
            found = np.zeros(rows.shape[1])
            found[kept] = np.linalg.lstsq(rows[:, kept], values, rcond=None)[0]
            off = float(np.sum((rows @ found - values) ** 2))
            if off < least and (found >= 0).all():
                best, least = found, off
    return best
