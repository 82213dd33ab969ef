"""The cost of paging runs in and out of memory: ratios on the built-in model, on the CPU, without a server.

    python bench/paging.py [--json] [--quick]

- one in: a step of 16 tenants with 256 tokens each, of which one has to come from disk and another one has to go there
  to make room, against the same step of 16 that are in memory. The two kinds of step alternate, so a neighbour on the
  machine hits both alike. What counts is the computing thread's own time and what it waits for the run; medians.
- a thousand: 1,000 registered runs with memory for 64. Steps of 16 tenants with 64 tokens each go round all of them, so
  every run of such a step comes from disk, and 16 others go there; every other one was announced by the pass before, as
  the queue does when it is not empty. Against the same steps of runs that stay.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.parts.passes import STEP, cut, execute, random_batch
from bench.parts.results import asked, at_least, claim, machine, tell
from bench.parts.serving import BASE_MODEL, as_workers_run
from scheduler.links.configs import TrainerBounds
from scheduler.links.messages import OpKind, Pass, RunSpec, TrainOp
from store.blobs.folder import FolderBlobs
from workers.model.base.weights import load_decoder
from workers.model.tiny import TINY_PATH
from workers.trainer.runs.state import kind_of
from workers.trainer.trainer import Trainer

RANK = 8
TENANTS = 16


class Runs:
    """A trainer with memory for `resident` runs and `registered` of them, all trained once."""

    def __init__(self, folder: Path, registered: int, resident: int) -> None:
        decoder = load_decoder(TINY_PATH)
        self.size_bytes = kind_of(spec("any"), decoder.config).size_bytes
        bounds = TrainerBounds(snapshot_every_tokens=1 << 40, resident_bytes=resident * self.size_bytes)
        self.blobs = FolderBlobs(folder / "blobs")
        self.trainer = Trainer({BASE_MODEL: decoder}, self.blobs, bounds)
        self.blobs.put("step", STEP)
        self.names = [f"run{i}" for i in range(registered)]
        for first in range(0, registered, TENANTS):
            some = self.names[first : first + TENANTS]
            self._execute([TrainOp(f"c{n}", n, 0, OpKind.CREATE, spec=spec(n)) for n in some])
            self.step(some, 8)

    def step(self, names: Sequence[str], tokens: int, soon: Sequence[str] = ()) -> float:
        """Wall seconds of one forward_backward and optimizer step of these runs, in one pass that tells which runs have
        their turn `soon`."""
        body = f"body{tokens}"
        if not self.blobs.exists(body):
            self.blobs.put(body, random_batch(1024, cut(tokens, 128), seed=tokens))
        ops = [TrainOp(f"f{n}", n, 1, OpKind.FORWARD_BACKWARD, body) for n in names]
        ops += [TrainOp(f"s{n}", n, 2, OpKind.OPTIM_STEP, "step") for n in names]
        began = time.perf_counter()
        self._execute(ops, soon)
        return time.perf_counter() - began

    def _execute(self, ops: list[TrainOp], soon: Sequence[str] = ()) -> None:
        execute(self.trainer, Pass(0, BASE_MODEL, ops, soon=list(soon)))


def spec(name: str) -> RunSpec:
    return RunSpec(name, BASE_MODEL, RANK, 16.0, 1, train_attn=True, train_mlp=True, train_unembed=True)


def one_in(folder: Path, rounds: int) -> dict[str, float]:
    runs = Runs(folder, registered=TENANTS + 48, resident=TENANTS + 8)
    fixed, others = runs.names[: TENANTS - 1], runs.names[TENANTS:]
    residency = runs.trainer.residency
    runs.step([*fixed, others[-1]], 256)
    walls: dict[str, list[float]] = {"cold": [], "warm": []}
    costs: dict[str, list[float]] = {"cold": [], "warm": []}
    for i in range(rounds):
        for kind in walls:
            paged, waited_s, busy_s = residency.page_ins, residency.waited_s, time.thread_time()
            walls[kind].append(runs.step([*fixed, others[i % len(others)]], 256))
            costs[kind].append(time.thread_time() - busy_s + residency.waited_s - waited_s)
            assert residency.page_ins - paged == (kind == "cold"), "not the runs that were meant to be in memory"
    return {
        "step_s": median(walls["warm"]),
        "step_with_one_in_s": median(walls["cold"]),
        "busy_s": median(costs["warm"]),
        "busy_and_waiting_with_one_in_s": median(costs["cold"]),
        "share_of_a_step": median(a / b for a, b in zip(costs["cold"], costs["warm"], strict=True)) - 1,
        "run_bytes": runs.size_bytes,
    }


def a_thousand(folder: Path, rounds: int) -> dict[str, float]:
    runs = Runs(folder, registered=1000, resident=64)
    residency = runs.trainer.residency
    # Two sets that stay: between two steps of others they have one each, so they are never the least recently used.
    stay = [runs.names[:TENANTS], runs.names[TENANTS : 2 * TENANTS]]
    others = [runs.names[at : at + TENANTS] for at in range(2 * TENANTS, 1000 - TENANTS, TENANTS)]
    page_ins = 0
    taken: dict[str, list[float]] = {"resident": [], "paged": [], "announced": []}
    for i in range(rounds):
        surprise, announced = others[2 * i % len(others)], others[(2 * i + 1) % len(others)]
        runs.step(stay[0], 64)
        before = residency.page_ins
        taken["paged"].append(runs.step(surprise, 64))
        taken["resident"].append(runs.step(stay[1], 64))
        runs.step(stay[0], 64, soon=announced)
        taken["announced"].append(runs.step(announced, 64))
        page_ins += residency.page_ins - before
        runs.step(stay[1], 64)
    resident, paged, announced_s = (median(found[1:]) for found in taken.values())
    return {
        "registered": len(runs.trainer.held.runs),
        "resident": residency.budget_bytes // runs.size_bytes,
        "budget_bytes": residency.budget_bytes,
        "peak_bytes": residency.peak_bytes,
        "paged_in_per_step": page_ins / (2 * rounds),
        "step_resident_s": resident,
        "step_paged_s": paged,
        "step_announced_s": announced_s,
        "resident_over_paged": resident / paged,
        "resident_over_announced": resident / announced_s,
    }


def main() -> None:
    args = asked(__doc__, quick="fewer repetitions").parse_args()
    rounds = 8 if args.quick else 40
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        one = one_in(Path(folder) / "one", rounds)
        thousand = a_thousand(Path(folder) / "thousand", rounds)
    announced = thousand["resident_over_announced"]
    share, bounded = one["share_of_a_step"], thousand["peak_bytes"] <= thousand["budget_bytes"]
    result: dict[str, Any] = {
        "bench": "paging",
        "compares": "steps whose runs come from disk with steps whose runs are in memory, one thread, no server",
        "machine": machine(),
        "one_in": one,
        "a_thousand": thousand,
        "claims": [
            claim("paging a run in, while others train, in steps", share, 0.05, share < 0.05),
            claim(
                "1,000 registered, 64 resident: peak memory / budget",
                thousand["peak_bytes"] / thousand["budget_bytes"],
                1.0,
                bounded,
            ),
            at_least("a step with 16 of 1,000 in memory / from disk, announced", announced, 0.95),
        ],
    }
    tell(result, args)


if __name__ == "__main__":
    as_workers_run()
    main()
