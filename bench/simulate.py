"""The simulator's trainers beside two real ones: loads that it has not seen, predicted within a tenth.

    python bench/simulate.py [--json]

An embedded service with two trainers of one thread each, on cores that clients and server share. What a pass takes is
found with three loads that keep both trainers at work: of few operations and few tokens, of many operations, of many
tokens. What a client takes between two steps is found with one client alone. Then other loads, which keep both trainers
at work, are played on the virtual clock: trained tokens per second, of clients with two steps in flight. All loads run
on the service in turns, ROUNDS times, and are summed, so that what else the machine does slows all alike. Each has runs
of its own, which stay where they are. `weftd simulate --check` is the same of generators.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tinker
from path import ADAM, batch
from serving import BASE_MODEL, claim, machine, make_key, serve

from scheduler.simulator.cluster import Cluster
from scheduler.simulator.simulation import Simulation
from scheduler.simulator.workloads import Workload

TENANTS, PASS_TOKENS, RANK, ROUNDS, TOLERANCE = 8, 2048, 8, 5, 0.1
CONFIG = f"""
[trainer]
threads = 1
replicas = 2
pass_tokens = {PASS_TOKENS}
[generator]
threads = 1
"""
#: Seconds that a load runs before it counts, and while it counts, in a round; and on the virtual clock.
WARM_S, COUNTED_S, PLAYED_S = 2.0, 4.0, 300.0
#: Batches that calibrate: two of them fill a pass, or 32; and that of a client alone.
LARGE, SMALL, ALONE = (8, 128), (1, 64), (1, 32)
#: What is predicted: the sequences of each tenant's batch, and their length.
CASES = {
    "three alike": [(4, 128)] * 3,
    "six of several sizes": [(2, 64), (2, 64), (4, 64), (4, 128), (8, 128), (8, 128)],
    "eight short": [(8, 64)] * 8,
}
#: All that is measured: the batches, and the steps that each client has in flight.
LOADS = {
    "few": ([SMALL] * 2, 1),
    "many": ([SMALL] * TENANTS, 1),
    "large": ([LARGE] * TENANTS, 2),
    "alone": ([ALONE], 1),
    **{name: (sizes, 2) for name, sizes in CASES.items()},
}


@dataclass(frozen=True)
class Counted:
    tokens: int
    passes: int
    busy_s: float
    seconds: float

    def __add__(self, more: Counted) -> Counted:
        tokens, passes = self.tokens + more.tokens, self.passes + more.passes
        return Counted(tokens, passes, self.busy_s + more.busy_s, self.seconds + more.seconds)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class Service:
    def __init__(self, url: str, data_dir: Path) -> None:
        keys = [make_key(data_dir, f"tenant-{i}") for i in range(TENANTS)]
        self._http = httpx.Client(base_url=url, headers={"X-API-Key": keys[0]}, timeout=60)
        self._clients = [tinker.ServiceClient(base_url=url, api_key=key) for key in keys]
        self._runs: dict[str, list[Any]] = {}

    def _runs_of(self, load: str, count: int) -> list[Any]:
        """One of each tenant, for this load alone."""
        if load not in self._runs:
            made = [client.create_lora_training_client(BASE_MODEL, rank=RANK) for client in self._clients[:count]]
            self._runs[load] = [one.result() for one in made]
        return self._runs[load]

    def counted(self, load: str, sizes: Sequence[tuple[int, int]], in_flight: int) -> Counted:
        """A client for each batch trains on it again and again; counted in the middle."""
        over, runs = list[bool](), self._runs_of(load, len(sizes))

        def train(number: int) -> None:
            run, data, open_steps = runs[number], batch(*sizes[number], seed=number), deque[Any]()
            while not over:
                if len(open_steps) == in_flight:
                    for future in open_steps.popleft():
                        future.result()
                open_steps.append((run.forward_backward(data, "cross_entropy"), run.optim_step(ADAM)))
            for step in open_steps:
                for future in step:
                    future.result()

        with ThreadPoolExecutor(TENANTS) as pool:
            working = [pool.submit(train, number) for number in range(len(sizes))]
            try:
                time.sleep(WARM_S)
                before, began = self._stats(), time.monotonic()
                time.sleep(COUNTED_S)
                after, seconds = self._stats(), time.monotonic() - began
            finally:
                over.append(True)
            for work in working:
                work.result()
        tokens, passes, busy_s = (after[name] - before[name] for name in ("tokens", "passes", "busy_s"))
        return Counted(int(tokens), int(passes), busy_s, seconds)

    def _stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self._http.get("/api/v1/weft/stats").json()["trainer"]
        return found

    def in_turns(self) -> dict[str, Counted]:
        """All loads, several times."""
        for name, load in LOADS.items():  # it does not count
            self.counted(name, *load)
        found = {name: self.counted(name, *load) for name, load in LOADS.items()}
        for _ in range(ROUNDS - 1):
            found = {name: found[name] + self.counted(name, *load) for name, load in LOADS.items()}
        return found


def calibrated(found: dict[str, Counted]) -> Cluster:
    """Two trainers. A pass is a constant, a part for each operation (a step has two), and a part for each token."""
    three = [found[name] for name in ("few", "many", "large")]
    tokens = [one.tokens / one.passes for one in three]
    steps = [of / math.prod(size) for of, size in zip(tokens, (SMALL, SMALL, LARGE), strict=True)]
    rows = np.array([(1.0, 2 * count, of) for count, of in zip(steps, tokens, strict=True)])
    pass_s, operation_s, token_s = np.linalg.solve(rows, [one.busy_s / one.passes for one in three])
    alone = found["alone"]
    return Cluster(
        replicas=1,
        gpus_per_replica=1,
        slots=1,
        turnaround_s=max(0.0, (alone.seconds - alone.busy_s) / (alone.tokens / math.prod(ALONE))),
        trainers=2,
        ranks=1,
        trained_tokens_per_s_per_gpu=1 / token_s,
        pass_s=max(0.0, pass_s),
        operation_s=max(0.0, operation_s),
        pass_tokens=PASS_TOKENS,
    )


def predicted(cluster: Cluster, sizes: Sequence[tuple[int, int]]) -> float:
    loads = [
        Workload("loop", 1, sequences, prompt=0, lengths=(length,), samples=False, overlap=1)
        for sequences, length in sizes
    ]
    played = Simulation(cluster, loads).run(PLAYED_S, WARM_S)
    return played.trained_tokens / played.seconds


@contextmanager
def service() -> Iterator[Service]:
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        config = Path(folder) / "weft.toml"
        config.write_text(CONFIG)
        with serve("--config", str(config)) as (url, data_dir):
            yield Service(url, data_dir)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    args = parser.parse_args()
    with service() as real:
        found = real.in_turns()
    cluster, cases = calibrated(found), dict[str, dict[str, float]]()
    for name, sizes in CASES.items():
        measured, foretold = found[name].tokens_per_s, predicted(cluster, sizes)
        cases[name] = {"measured": measured, "predicted": foretold, "off": abs(foretold / measured - 1)}
    calibration = {name: getattr(cluster, name) for name in ("pass_s", "operation_s", "turnaround_s")}
    calibration["tokens_per_s_of_a_trainer"] = cluster.trained_tokens_per_s_per_gpu
    result = {
        "bench": "simulate",
        "compares": "trained tokens per second of two trainers, as played and as measured",
        "machine": machine(),
        "loads": {name: asdict(load) for name, load in found.items()},
        "calibration": calibration,
        "cases": cases,
        "claims": [
            claim(f"two trainers, {name}: off by", case["off"], TOLERANCE, case["off"] <= TOLERANCE)
            for name, case in cases.items()
        ],
    }
    print(json.dumps(result) if args.json else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
