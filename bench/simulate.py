"""The simulator's trainers beside two real ones: loads that it has not seen, predicted within a tenth.

    python bench/simulate.py [--json]

An embedded service with two trainers of one thread each. What a pass takes is found with eight clients (both trainers
at work, on cores that clients and server share): one short sequence each fills an eighth of a pass at most, eight
long ones fill it. What a client takes between two steps is found with one client alone. Then other loads, which keep
both trainers at work, are played on the virtual clock and on the service: trained tokens per second, of clients with
two steps in flight. A load that is off is calibrated for and measured again, at most TRIES times: other work on the
machine disturbs both. `weftd simulate --check` is the same of generators.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import tinker
from path import ADAM, batch
from serving import BASE_MODEL, claim, machine, make_key, serve

from scheduler.simulator.cluster import Cluster
from scheduler.simulator.simulation import Simulation
from scheduler.simulator.workloads import Workload

TENANTS, PASS_TOKENS, RANK, TRIES, TOLERANCE = 8, 2048, 8, 3, 0.1
CONFIG = f"""
[trainer]
threads = 1
replicas = 2
pass_tokens = {PASS_TOKENS}
[generator]
threads = 1
"""
#: Seconds that a load runs before it counts, and while it counts; and on the virtual clock.
WARM_S, COUNTED_S, PLAYED_S = 4.0, 12.0, 300.0
#: What is predicted: the sequences of each tenant's batch, and their length.
CASES = {
    "three alike": [(4, 128)] * 3,
    "six of several sizes": [(2, 64), (2, 64), (4, 64), (4, 128), (8, 128), (8, 128)],
    "eight short": [(8, 64)] * 8,
}


@dataclass(frozen=True)
class Counted:
    tokens: int
    passes: int
    busy_s: float
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class Service:
    def __init__(self, url: str, data_dir: Path) -> None:
        keys = [make_key(data_dir, f"tenant-{i}") for i in range(TENANTS)]
        self._http = httpx.Client(base_url=url, headers={"X-API-Key": keys[0]}, timeout=60)
        self._runs = [
            tinker.ServiceClient(base_url=url, api_key=key).create_lora_training_client(BASE_MODEL, rank=RANK).result()
            for key in keys
        ]

    def counted(self, sizes: Sequence[tuple[int, int]], in_flight: int = 2) -> Counted:
        """A client for each batch trains on it again and again; counted in the middle."""
        over: list[bool] = []

        def train(number: int) -> None:
            run, data, open_steps = self._runs[number], batch(*sizes[number], seed=number), deque[Any]()
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

    def calibrated(self) -> Cluster:
        small, large = self.counted([(1, 64)] * TENANTS, in_flight=1), self.counted([(8, 128)] * TENANTS)
        each = [(found.tokens / found.passes, found.busy_s / found.passes) for found in (small, large)]
        if each[1][0] <= 2 * each[0][0] or each[1][1] <= each[0][1]:
            found = "; ".join(f"{tokens:.0f} tokens in {seconds:.4f} s" for tokens, seconds in each)
            raise RuntimeError(f"passes of few and of many tokens cannot be told apart ({found}): run it alone")
        rate = (each[1][0] - each[0][0]) / (each[1][1] - each[0][1])
        pass_s = max(0.0, each[1][1] - each[1][0] / rate)
        alone = self.counted([(1, 32)], in_flight=1)
        steps = alone.tokens / 32
        return Cluster(
            replicas=1,
            gpus_per_replica=1,
            slots=1,
            turnaround_s=max(0.0, (alone.seconds - alone.busy_s) / steps),
            trainers=2,
            ranks=1,
            trained_tokens_per_s_per_gpu=rate,
            pass_s=pass_s,
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
    cases: dict[str, dict[str, float]] = {}
    with service() as real:
        real.counted([(8, 128)] * TENANTS)  # warm, and shared between both trainers
        for name, sizes in CASES.items():
            for tries in range(1, TRIES + 1):
                cluster = real.calibrated()
                measured, foretold = real.counted(sizes).tokens_per_s, predicted(cluster, sizes)
                off = abs(foretold / measured - 1)
                cases[name] = {"measured": measured, "predicted": foretold, "off": off, "tries": tries}
                cases[name] |= {"pass_s": cluster.pass_s, "turnaround_s": cluster.turnaround_s}
                cases[name] |= {"tokens_per_s_of_a_trainer": cluster.trained_tokens_per_s_per_gpu}
                if off <= TOLERANCE:
                    break
    result = {
        "bench": "simulate",
        "compares": "trained tokens per second of two trainers, as played and as measured",
        "machine": machine(),
        "cases": cases,
        "claims": [
            claim(f"two trainers, {name}: off by", case["off"], TOLERANCE, case["off"] <= TOLERANCE)
            for name, case in cases.items()
        ],
    }
    print(json.dumps(result) if args.json else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
