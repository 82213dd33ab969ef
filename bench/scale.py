"""What a second trainer brings, and what it costs when one dies or a run moves.

    python bench/scale.py [--json] [--quick]

- Two services in turns, one with one trainer and one with two, each trainer with one thread: trained tokens per second
  of eight unmodified `tinker` clients, through API, journal and settlement, on the model of `bench/parts/toy.py`. Of
  three cores or more each trainer has one for itself; two are shared by clients, servers and trainers, so there all
  else slows both trainers. The figure beside it is of the trainers alone: tokens per second of their passes (`busy_s`),
  summed. Processor time (`cpu_us_per_token`, of trainers, server and clients) does not depend on who else uses the
  cores: twice a trainer's tokens per second of it is what two trainers make where each has a core, and all else another
  one.
- On the one with two, with all clients at work: a trainer is killed by SIGKILL. From then to the next result of the
  run that waited longest, less what a run usually waits. States are saved every 2,048 tokens: a replay of two steps.
- Then a trainer is told to leave (SIGTERM), its runs go to the other one or to its successor, which joins meanwhile,
  and loads are evened out (`moves`: how many runs that moved): the longest that any run waited for a result meanwhile,
  in passes of that time (the mean of `busy_s` / `passes`), less what runs wait where one trainer has all of them anyway
  (the 95th percentile, on the service with one, just before, in passes of that time). Each is in passes of its own time
  because a pass takes longer while two trainers share the cores than while one has them.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil
import tinker

from bench.parts.data import batch
from bench.parts.results import asked, at_least, at_most, machine, percentile, tell
from bench.parts.serving import cpu_s, make_key, serve, trainers_of
from bench.parts.toy import save_toy
from bench.path import ADAM

TENANTS, SEQUENCES, LENGTH, RANK = 8, 8, 128, 8
TOKENS = SEQUENCES * LENGTH
CONFIG = """
[trainer]
threads = 1
replicas = {trainers}
pass_tokens = 2048
snapshot_every_tokens = 2048
[generator]
threads = 1
"""
#: How long anything may take, in seconds.
PATIENCE_S = 60.0


class Service:
    """A server with some trainers, and its clients."""

    def __init__(self, url: str, data_dir: Path) -> None:
        keys = [make_key(data_dir, f"tenant-{i}") for i in range(TENANTS)]
        self._http = httpx.Client(base_url=url, headers={"X-API-Key": keys[0]}, timeout=PATIENCE_S)
        self.pid = int((data_dir / "server.lock").read_text().split()[0])
        clients = [tinker.ServiceClient(base_url=url, api_key=key) for key in keys]
        self._runs = [client.create_lora_training_client("toy", rank=RANK).result() for client in clients]
        self.results: list[list[float]] = [[] for _ in self._runs]  # when each client had a result

    def train(self, number: int, steps: int, over: threading.Event) -> None:
        """Keep two steps in flight, until `over` or until `steps` are done."""
        run, data, open_steps = self._runs[number], batch(SEQUENCES, LENGTH, seed=number), deque[Any]()
        for _ in range(steps):
            if over.is_set():
                break
            if len(open_steps) == 2:
                self._end(number, open_steps.popleft())
            open_steps.append((run.forward_backward(data, "cross_entropy"), run.optim_step(ADAM)))
        for step in open_steps:
            self._end(number, step)

    def _end(self, number: int, step: tuple[Any, Any]) -> None:
        for future in step:
            future.result()
        self.results[number].append(time.monotonic())

    def steps(self, count: int) -> float:
        """Tokens per second over `count` steps of every client."""
        start, never = time.perf_counter(), threading.Event()
        with ThreadPoolExecutor(TENANTS) as pool:
            list(pool.map(lambda number: self.train(number, count, never), range(TENANTS)))
        return count * TENANTS * TOKENS / (time.perf_counter() - start)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """All clients train during the block."""
        over = threading.Event()
        with ThreadPoolExecutor(TENANTS) as pool:
            working = [pool.submit(self.train, number, 10**9, over) for number in range(TENANTS)]
            try:
                yield
            finally:
                over.set()
                for work in working:
                    work.result()

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self._http.get("/api/v1/weft/stats").json()["trainer"]
        return found

    def cpu_s(self) -> Counter[str]:
        """Processor time so far: of the trainers, of the server with all other processes that it has started, and of
        the clients."""
        own = psutil.Process().cpu_times()
        return Counter({"clients": own.user + own.system}) + cpu_s(self.pid)

    def give(self, cores: Sequence[int]) -> None:
        """Give each trainer a core for itself."""
        for trainer, core in zip(trainers_of(self.pid), cores, strict=False):
            for thread in trainer.threads():
                os.sched_setaffinity(thread.id, {core})

    def shared(self, trainers: int) -> None:
        """Wait until that many trainers have runs."""
        deadline = time.monotonic() + PATIENCE_S
        while sum(one["runs"] > 0 for one in self.stats()["replicas"].values()) < trainers:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the runs are not on {trainers} trainers: {self.stats()}")
            time.sleep(0.1)

    def all_after(self, since: float) -> None:
        """Wait until every client has had a result since then."""
        deadline = time.monotonic() + PATIENCE_S
        while not all(times and times[-1] > since for times in self.results):
            if time.monotonic() > deadline:
                raise RuntimeError("a client has had no result for a minute")
            time.sleep(0.02)

    def waits(self, since: float, until: float) -> list[float]:
        """The times between each client's results."""
        inside = ([at for at in times if since <= at <= until] for times in self.results)
        return [b - a for times in inside for a, b in pairwise(times)]

    def gaps(self, since: float, until: float) -> list[float]:
        """The longest time that each client waited for a result."""
        found = []
        for times in self.results:
            inside = [at for at in times if since <= at <= until]
            marks = [since, *inside, min([at for at in times if at > until], default=until)]
            found.append(max(b - a for a, b in pairwise(marks)))
        return found


def for_trainers() -> list[int]:
    """Two cores for the trainers, if there are three: from now on this process and those that it starts keep to the
    others."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 3:
        return []
    os.sched_setaffinity(0, cores[2:])
    return cores[:2]


def trainers_alone(before: dict[str, Any], after: dict[str, Any]) -> float:
    """Tokens per second of passes, summed over the trainers."""
    parts = after["replicas"].items()
    speeds = []
    for name, part in parts:
        old = before["replicas"].get(name, {"tokens": 0, "busy_s": 0.0})
        if part["busy_s"] > old["busy_s"]:
            speeds.append((part["tokens"] - old["tokens"]) / (part["busy_s"] - old["busy_s"]))
    return sum(speeds)


def waits_on_one(service: Service, calm_s: float) -> dict[str, float]:
    """How long runs usually wait for a result while one trainer has all of them, in seconds."""
    with service.at_work():
        service.all_after(time.monotonic())
        began, before = time.monotonic(), service.stats()
        time.sleep(calm_s)
        found, after = service.waits(began, time.monotonic()), service.stats()
    return {"p50_s": percentile(found, 0.5), "p95_s": percentile(found, 0.95), "pass_s": pass_s(before, after)}


def pass_s(before: dict[str, Any], after: dict[str, Any]) -> float:
    """The average seconds of a pass between two `stats`."""
    return float((after["busy_s"] - before["busy_s"]) / (after["passes"] - before["passes"]))


def disturbances(service: Service, calm_s: float) -> dict[str, float]:
    """Kill a trainer, then let another leave and its successor join; the pauses in seconds."""
    with service.at_work():
        service.shared(2)
        began = time.monotonic()
        time.sleep(calm_s)
        usual_s = statistics.median(service.gaps(began, time.monotonic()))
        killed = time.monotonic()
        trainers_of(service.pid)[0].send_signal(signal.SIGKILL)
        service.all_after(killed)
        death_s = max(service.gaps(killed, time.monotonic()))
        service.shared(2)
        time.sleep(calm_s)
        told, before = time.monotonic(), service.stats()
        trainers_of(service.pid)[0].send_signal(signal.SIGTERM)
        service.all_after(told)
        service.shared(2)
        service.all_after(time.monotonic())
        pause_s, after = max(service.gaps(told, time.monotonic())), service.stats()
    figures = {"usual_s": usual_s, "death_s": death_s, "moves": after["moves"], "pause_s": pause_s}
    return figures | {"pass_s": pass_s(before, after)}


def main() -> None:
    args = asked(__doc__, quick="fewer repetitions").parse_args()
    rounds, count, calm_s = (1, 3, 6.0) if args.quick else (5, 4, 15.0)
    through: dict[int, list[float]] = {1: [], 2: []}
    alone: dict[int, list[float]] = {1: [], 2: []}
    spent: dict[int, Counter[str]] = {1: Counter(), 2: Counter()}
    taken_with, cores = machine(), for_trainers()
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        configs = {trainers: Path(folder) / f"{trainers}.toml" for trainers in (1, 2)}
        for trainers, config in configs.items():
            config.write_text(CONFIG.format(trainers=trainers))
        model = f"toy={save_toy(Path(folder) / 'toy')}"
        started = {trainers: serve("--config", str(config), "--model", model) for trainers, config in configs.items()}
        with started[1] as first, started[2] as second:
            services = {1: Service(*first), 2: Service(*second)}
            with services[2].at_work():
                services[2].shared(2)
            for service in services.values():
                service.give(cores)
            for turn in range(rounds + 1):
                for trainers, service in services.items():
                    before, began = service.stats(), service.cpu_s()
                    figure = service.steps(count)
                    if turn:
                        spent[trainers] += service.cpu_s() - began
                        through[trainers].append(figure)
                        alone[trainers].append(trainers_alone(before, service.stats()))
            on_one = waits_on_one(services[1], 2 * calm_s)
            disturbed = disturbances(services[2], calm_s)
    tokens = rounds * count * TENANTS * TOKENS
    cpu_us = {trainers: {who: 1e6 * of / tokens for who, of in parts.items()} for trainers, parts in spent.items()}
    own_cores = 2 * cpu_us[1]["trainers"] / cpu_us[2]["trainers"]
    best = {trainers: max(figures) for trainers, figures in through.items()}
    ratio, inside = best[2] / best[1], max(alone[2]) / max(alone[1])
    death_s = disturbed["death_s"] - disturbed["usual_s"]
    passes = max(0.0, disturbed["pause_s"] / disturbed["pass_s"] - on_one["p95_s"] / on_one["pass_s"])
    result = {
        "bench": "scale",
        "compares": "two trainers of one thread with one, through the API, in turns; a death, and moves",
        "machine": taken_with,
        "cores_of_trainers": cores,
        "tokens_per_s": through,
        "tokens_per_s_in_passes": alone,
        "cpu_us_per_token": cpu_us,
        "waits_on_one": on_one,
        "disturbed": disturbed,
        "claims": [
            at_least("two trainers / one, tokens/s through the API", ratio, 1.8),
            at_least("two trainers / one, tokens/s in their passes", inside, 1.8),
            at_least("two trainers / one, twice the tokens per processor time", own_cores, 1.8),
            at_most("from a trainer's death to its runs' next result, s", death_s, 10.0),
            at_most("the pause of a run that moves, beyond waits on one trainer, passes", passes, 2.0),
        ],
    }
    tell(result, args)


if __name__ == "__main__":
    main()
