"""Asynchrony in RL: what a lag gains in time and costs in reward, on an environment that takes its time.

    python bench/async_rl.py [--json] [--quick]

One `weftd` with the built-in model; every seed trains one run after the other under each schedule, on the same tasks,
so figures of a seed are paired. The environment waits before it gives a reward, log-normal with a median of 0.4 s, as
one that runs code or asks a judge would. Schedules: Sync(); Async(1) with its default loss (PPO); Async(3) with PPO. A
final reward is the mean over the last quarter of the steps; `s_to_target` the seconds until the mean of four steps was
at the target.

Claims: lag 1 is at the target in at most 60 % of sync's time and ends within 0.03 of it, PPO at lag 3 within 0.05, no
group is older than its schedule allows, and an unclipped loss at a lag above 1 is warned of. --quick shows that the
command runs, on one seed and few steps; its figures say nothing. What has ended is told on stderr.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
import warnings
from statistics import fmean
from typing import Any

import weft
from weft import rl
from weft.rl.envs.environment import Prompts
from weft.rl.loops.train import Recipe

from bench.parts.results import asked, at_most, claim, machine, tell
from bench.parts.serving import BASE_MODEL, make_key, serve

TARGET = 0.84
SCHEDULES: dict[str, rl.Sync | rl.Async] = {"sync": rl.Sync(), "lag_1": rl.Async(1), "ppo_lag_3": rl.Async(3)}
MEDIAN_S, SIGMA = 0.4, 1.0
LOSSES = {"sync": None, "lag_1": None, "ppo_lag_3": rl.losses.ppo()}


class Clock:
    """When each step ended."""

    def __init__(self) -> None:
        self.began, self.at = time.perf_counter(), list[float]()

    def log(self, step: int, of: int, metrics: dict[str, float]) -> None:
        self.at.append(time.perf_counter() - self.began)

    def close(self) -> None:
        """The clock keeps nothing open."""


def environment(seed: int) -> Prompts:
    """The environment: sums, with a judge that takes its time."""
    draw = random.Random(seed)
    sums = [(draw.randint(1, 9), draw.randint(1, 9)) for _ in range(200)]
    tasks = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in sums]
    wait = random.Random(seed + 1)

    async def judged(text: str, task: Any) -> float:
        await asyncio.sleep(wait.lognormvariate(math.log(MEDIAN_S), SIGMA))
        return float(text.strip() == task["answer"])

    return rl.prompts(tasks, judged, max_tokens=6)


def one(service: weft.ServiceClient, schedule: str, seed: int, steps: int, groups: rl.Groups) -> dict[str, Any]:
    run = service.create_lora_training_client(BASE_MODEL, rank=16, seed=seed)
    clock = Clock()
    report = rl.train(
        run,
        environment(seed),
        steps=steps,
        groups=groups,
        schedule=SCHEDULES[schedule],
        loss=LOSSES[schedule],
        learning_rate=1e-3,
        seed=seed,
        sinks=[clock],
    )
    rewards = report.curve("reward")
    smooth = [fmean(rewards[max(0, at - 3) : at + 1]) for at in range(len(rewards))]
    reached = next((clock.at[at] for at, reward in enumerate(smooth) if reward >= TARGET), None)
    return {
        "seconds": clock.at[-1],
        "s_to_target": reached,
        "final_reward": fmean(rewards[-max(1, steps // 4) :]),
        "max_lag": max(report.curve("lag/max"), default=0.0),
        "mismatch_kl": fmean(report.curve("mismatch_kl")[-5:]),
        "waste_usd": report.steps[-1]["waste_usd"],
        "rewards": rewards,
    }


def warns() -> bool:
    """Whether the loop warns of an unclipped loss at lag 3."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        Recipe(schedule=rl.Async(3), loss=rl.losses.importance_sampling()).chosen_loss()
    return any("bounds no ratio" in str(one.message) for one in said)


def claims(cells: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    def final(name: str) -> float:
        return fmean(cell["final_reward"] for cell in cells[name])

    pairs = [(a["s_to_target"], b["s_to_target"]) for a, b in zip(cells["lag_1"], cells["sync"], strict=True)]
    reached = [lag_s / sync_s for lag_s, sync_s in pairs if lag_s is not None and sync_s is not None]
    name = f"seeds whose reward is at {TARGET} at some time, in sync and at lag 1"
    found = [claim(name, len(reached), len(pairs), len(reached) == len(pairs))]
    if reached:
        share = fmean(reached)
        found.append(at_most(f"time to {TARGET} at lag 1 / sync", share, 0.6))
    for name, bound in (("lag_1", 0.03), ("ppo_lag_3", 0.05)):
        behind = final("sync") - final(name)
        found.append(at_most(f"final reward of sync less that of {name}", behind, bound))
    for name, schedule in SCHEDULES.items():
        oldest = max(cell["max_lag"] for cell in cells[name])
        found.append(at_most(f"oldest group of {name}, steps", oldest, schedule.max_lag))
    warned = warns()
    return [*found, claim("an unclipped loss at lag 3 is warned of", float(warned), 1, warned)]


def main() -> None:
    args = asked(__doc__, quick="one seed, few steps").parse_args()
    seeds, steps = ((0,), 3) if args.quick else ((0, 1, 2), 24)
    groups = rl.Groups(batch=4, size=4) if args.quick else rl.Groups(batch=12, size=8)
    cells: dict[str, list[dict[str, Any]]] = {name: [] for name in SCHEDULES}
    with (
        serve() as (url, data_dir),
        weft.ServiceClient(base_url=url, api_key=make_key(data_dir, "bench")) as service,
    ):
        for seed in seeds:
            for name in SCHEDULES:
                cells[name].append(one(service, name, seed, steps, groups))
                print(name, seed, f"{cells[name][-1]['seconds']:.0f} s", file=sys.stderr, flush=True)
    result = {
        "bench": "async_rl",
        "compares": "schedules of weft.rl on one weftd, one after the other, paired by seed",
        "machine": machine(),
        "steps": steps,
        "seeds": len(seeds),
        "cells": cells,
        "claims": claims(cells),
    }
    tell(result, args)


if __name__ == "__main__":
    main()
