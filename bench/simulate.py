"""The simulator's trainers beside real ones: loads that it has not seen, predicted within a tenth.

    python bench/simulate.py [--json] [--rounds 2] [--trainers 1 2] [--cases "uneven" ...]      # all of it: 14 minutes

Two embedded services, one with one trainer and one with two. Each trainer has one thread and a core of its own, as it
would have GPUs of its own; clients and servers share the others. Two things are found with loads that are not
predicted: what a pass takes (`calibrate_trainer`), from six that differ in stages, slices, steps, tokens and lengths,
in processor time of the trainers, which other work on the machine makes little longer; and what a client takes between
two steps, with one client alone. Then other loads are played on the virtual clock. All loads run on both services in
turns, and rounds are summed, so that what disturbs one disturbs all. `weftd simulate --check` does so for generators.

Of each load, as played and as measured:

- tokens in a pass, and the trainers' processor time of a pass;
- trained tokens in the time of a pass: that of the load `large`, played and on the wall in the same rounds, so that a
  machine that is slowed is no error;
- what each tenant had of it: the part of all tokens that went to another tenant than was played. Which of several
  tenants with the same load has less than the others, where they cannot be even, is chance: of each such group the one
  that has most is beside the one that was played to have most, and so on, round by round;
- how much the rounds differ: the largest error of one round, were it played instead of measured. No prediction can be
  expected to be nearer.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sqlite3
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import tinker

from bench.parts.serving import BASE_MODEL, claim, machine, make_key, serve
from bench.path import ADAM, batch
from scheduler.order.homes import STAY_S
from scheduler.simulator.calibration import calibrate_trainer
from scheduler.simulator.cluster import Cluster
from scheduler.simulator.simulation import Simulation
from scheduler.simulator.trainer import Work
from scheduler.simulator.workloads import Workload

TENANTS, PASS_TOKENS, RANK, TOLERANCE = 16, 2048, 8, 0.1
CONFIG = f"""
[trainer]
threads = 1
replicas = {{trainers}}
pass_tokens = {PASS_TOKENS}
[generator]
threads = 1
"""
#: Seconds that a load runs before it counts, and while it counts, in a round; and on the virtual clock. Where it counts
#: what lives where, it takes longer: placing remembers what other runs had outstanding (`scheduler.order.homes`).
WARM_S, PLACED_S, COUNTED_S, PLAYED_S = 1.0, 2 * STAY_S, 4.0, 200.0


@dataclass(frozen=True)
class Load:
    """Each client trains on a batch of (sequences, length) again and again: `backwards` forward_backwards and a step,
    with so many of those in flight. A batch is one slice."""

    batches: Sequence[tuple[int, int]]
    in_flight: int = 2
    backwards: int = 1

    def tokens(self, tenant: int) -> int:
        """Of a batch."""
        return math.prod(self.batches[tenant])

    def pairs(self, tenant: int) -> int:
        sequences, length = self.batches[tenant]
        return sequences * length**2

    def parts(self, tokens: Sequence[float]) -> list[float]:
        """Of all tokens, what each tenant had; tenants with the same batch in the order of that."""
        ordered = sorted(zip(self.batches, tokens, strict=True))
        return [part / sum(tokens) for _, part in ordered]


#: On a CPU torch's attention takes less for each pair the longer a sequence is (twice as long: a quarter less), so what
#: calibrates is about as long as what is predicted.
CALIBRATING = {
    "alone": Load([(1, 32)], in_flight=1),
    "few": Load([(1, 64)] * 2),
    "many": Load([(1, 64)] * 8),
    "gathering": Load([(1, 64)] * 8, backwards=4),
    "large": Load([(8, 128)] * 8),
    "long": Load([(3, 320)] * 4),
}
CASES = {
    "three alike": Load([(4, 128)] * 3),
    "short sequences": Load([(8, 32)] * 8),
    "long sequences": Load([(2, 512)] * 4),
    "many tenants": Load([(4, 64)] * TENANTS),
    "uneven": Load([(2, 64), (2, 64), (4, 64), (4, 128), (8, 128), (8, 128)]),
}
LOADS = {**CALIBRATING, **CASES}


@dataclass
class Pass:
    """One that was, from the timings of its operations; times in seconds since 1970."""

    tokens: int
    began_s: float = math.inf
    ended_s: float = 0.0
    backwards: Counter[str] = field(default_factory=Counter)  # by tenant
    steps: Counter[str] = field(default_factory=Counter)  # by tenant
    stages: set[int] = field(default_factory=set)

    def join(self, tenant: str, kind: str, begins_s: float, ends_s: float) -> None:
        """Operations come in a run's order, and each tenant has one run here."""
        self.began_s, self.ended_s = min(self.began_s, begins_s), max(self.ended_s, ends_s)
        if kind == "optim_step":
            self.steps[tenant] += 1
        elif kind == "forward_backward":
            self.backwards[tenant] += 1
            self.stages.add(self.steps[tenant])


@dataclass
class Counted:
    """What a load has done: `work` in processor time of the trainers, and on the wall the time of all and of passes.
    `parts`: what tenants had (`Load.parts`)."""

    work: Work
    wall_s: float
    passes_s: float
    parts: list[float]

    @classmethod
    def of(cls, window: Window, passes: Sequence[Pass]) -> Counted:
        """A pass that was partly in the window counts in part, as its processor time does."""
        load, work, passes_s = LOADS[window.load], Work(seconds=window.cpu_s), 0.0
        tokens = [0.0] * len(load.batches)
        for one in passes:
            inside_s = min(one.ended_s, window.ended_s) - max(one.began_s, window.began_s)
            if inside_s <= 0:
                continue
            share = inside_s / (one.ended_s - one.began_s)
            pairs = sum(of * load.pairs(_number(tenant)) for tenant, of in one.backwards.items())
            counts = one.backwards.total(), one.steps.total(), one.tokens, pairs
            work.add(Work(*(share * count for count in (one.tokens > 0, len(one.stages), *counts))))
            passes_s += inside_s
            for tenant, of in one.backwards.items():
                tokens[_number(tenant)] += share * of * load.tokens(_number(tenant))
        return cls(work, window.ended_s - window.began_s, passes_s, load.parts(tokens))

    @classmethod
    def together(cls, rounds: Sequence[Counted]) -> Counted:
        work = Work()
        for one in rounds:
            work.add(one.work)
        parts = [sum(each) / len(rounds) for each in zip(*(one.parts for one in rounds), strict=True)]
        return cls(work, sum(one.wall_s for one in rounds), sum(one.passes_s for one in rounds), parts)


@dataclass(frozen=True)
class Window:
    """A time in which a load was counted: its ends in seconds since 1970, and the trainers' processor time between."""

    load: str
    began_s: float
    ended_s: float
    cpu_s: float


def _number(tenant: str) -> int:
    return int(tenant.removeprefix("tenant-"))


class Service:
    """A server with its trainers, and its clients."""

    def __init__(self, url: str, data_dir: Path, cores: Sequence[int]) -> None:
        """`cores`: one for each trainer."""
        self._cores = cores
        self._database = data_dir / "weft.db"
        self._server = psutil.Process(int((data_dir / "server.lock").read_text()))
        keys = [make_key(data_dir, f"tenant-{i}") for i in range(TENANTS)]
        self._clients = [tinker.ServiceClient(base_url=url, api_key=key) for key in keys]
        self._runs: dict[str, list[Any]] = {}

    def runs_of(self, load: str) -> list[Any]:
        """One of each tenant, for this load alone."""
        if load not in self._runs:
            clients = self._clients[: len(LOADS[load].batches)]
            made = [client.create_lora_training_client(BASE_MODEL, rank=RANK) for client in clients]
            self._runs[load] = [one.result() for one in made]
        return self._runs[load]

    def counted(self, name: str, warm_s: float) -> Window:
        """All clients of a load at work; counted in the middle."""
        load, runs, over = LOADS[name], self.runs_of(name), list[bool]()

        def train(number: int) -> None:
            run, data, open_steps = runs[number], batch(*load.batches[number], seed=number), deque[Any]()
            while not over:
                if len(open_steps) == load.in_flight:
                    for future in open_steps.popleft():
                        future.result()
                gathered = [run.forward_backward(data, "cross_entropy") for _ in range(load.backwards)]
                open_steps.append([*gathered, run.optim_step(ADAM)])
            for step in open_steps:
                for future in step:
                    future.result()

        self._place()
        with ThreadPoolExecutor(TENANTS) as pool:
            working = [pool.submit(train, number) for number in range(len(runs))]
            try:
                time.sleep(warm_s)
                began_s, before_s = time.time(), self._cpu_s()
                time.sleep(COUNTED_S)
                ended_s, after_s = time.time(), self._cpu_s()
            finally:
                over.append(True)
            for work in working:
                work.result()
        return Window(name, began_s, ended_s, after_s - before_s)

    @property
    def _trainers(self) -> list[psutil.Process]:
        return [child for child in self._server.children() if child.name() == "weft-trainer"]

    def _place(self) -> None:
        """Each trainer, with all of its threads, on its core."""
        for core, trainer in zip(self._cores, self._trainers, strict=True):
            for thread in trainer.threads():
                os.sched_setaffinity(thread.id, [core])

    def _cpu_s(self) -> float:
        """Processor time of the trainers so far."""
        return sum(sum(trainer.cpu_times()[:2]) for trainer in self._trainers)

    def passes(self) -> list[Pass]:
        """All that were, from the times of the operations in them."""
        found: dict[int, Pass] = {}
        with closing(sqlite3.connect(self._database)) as database:
            asked = (
                "SELECT organisations.name, kind, accepted_at, timings FROM operations"
                " JOIN organisations ON organisations.id = org_id WHERE timings IS NOT NULL ORDER BY lane, seq"
            )
            for tenant, kind, accepted_at, timings in database.execute(asked):
                accepted_s = datetime.fromisoformat(accepted_at).replace(tzinfo=UTC).timestamp()
                for number, begins_us, ends_us, _, _, tokens in json.loads(timings)["stretches"]:
                    one = found.setdefault(number, Pass(tokens))
                    one.join(tenant, kind, accepted_s + begins_us / 1e6, accepted_s + ends_us / 1e6)
        return list(found.values())


#: What was counted of each load, by round.
Rounds = Mapping[str, Sequence[Counted]]


def in_turns(reals: Mapping[int, Service], cases: Sequence[str], rounds: int) -> dict[int, Rounds]:
    """All loads on all services, after a round that does not count."""
    windows: dict[int, list[Window]] = {trainers: [] for trainers in reals}
    for turn in range(rounds + 1):
        for name in (*CALIBRATING, *cases):
            for trainers, real in reals.items():
                placed = turn > 0 and trainers > 1 and name in CASES
                window = real.counted(name, PLACED_S if placed else WARM_S)
                windows[trainers] += [window] * (turn > 0)
    found: dict[int, Rounds] = {}
    for trainers, real in reals.items():
        passes, counted = real.passes(), defaultdict[str, list[Counted]](list)
        for window in windows[trainers]:
            counted[window.load].append(Counted.of(window, passes))
        found[trainers] = counted
    return found


def calibrated(trainers: int, found: Mapping[str, Counted]) -> Cluster:
    """Time is processor time of the trainers: what passes on the wall beside them is told in it."""
    machine = Cluster(replicas=1, gpus_per_replica=1, slots=1, trainers=trainers, pass_tokens=PASS_TOKENS)
    machine = calibrate_trainer(machine, [found[name].work for name in CALIBRATING])
    alone = found["alone"]
    beside_s = (alone.wall_s - alone.passes_s) / alone.work.light * alone.work.seconds / alone.passes_s
    return replace(machine, turnaround_s=max(0.0, beside_s))


@dataclass(frozen=True)
class Figures:
    """Of a load, played or measured. `tokens_in_a_pass_s`: in the time of a pass of the load "large"."""

    tokens_of_a_pass: float
    pass_cpu_ms: float
    tokens_in_a_pass_s: float
    parts: list[float]

    @classmethod
    def of(cls, work: Work, tokens_per_s: float, pass_s: float, parts: Sequence[float]) -> Figures:
        per_pass = work.tokens / work.passes, 1e3 * work.seconds / work.passes
        return cls(*per_pass, tokens_per_s * pass_s, list(parts))

    def off(self, other: Figures) -> dict[str, float]:
        """Relative errors of these figures, which were played; and the part of the tokens that others had."""
        found = {
            name: getattr(self, name) / getattr(other, name) - 1
            for name in ("tokens_of_a_pass", "pass_cpu_ms", "tokens_in_a_pass_s")
        }
        parts = zip(self.parts, other.parts, strict=True)
        return found | {"went_to_others": sum(abs(mine - theirs) for mine, theirs in parts) / 2}


def played(cluster: Cluster, load: Load, pass_s: float) -> Figures:
    loads = [
        Workload("loop", 1, sequences, prompt=0, lengths=(length,), samples=False, overlap=load.in_flight - 1)
        for sequences, length in load.batches
    ]
    result = Simulation(cluster, loads).run(PLAYED_S, WARM_S)
    trained = [tenant.trained_tokens for tenant in result.tenants]
    return Figures.of(result.trainers, result.trained_tokens / result.seconds, pass_s, load.parts(trained))


def measured(found: Counted, large: Counted) -> Figures:
    """`large`: the load of that name in the same rounds."""
    pass_s = large.passes_s / large.work.passes
    return Figures.of(found.work, found.work.tokens / found.wall_s, pass_s, found.parts)


@contextmanager
def service(trainers: int, cores: Sequence[int]) -> Iterator[Service]:
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        config = Path(folder) / "weft.toml"
        config.write_text(CONFIG.format(trainers=trainers))
        with serve("--config", str(config)) as (url, data_dir):
            yield Service(url, data_dir, cores)


def beside(trainers: int, rounds: Rounds) -> dict[str, Any]:
    """What was played beside what was measured, with so many trainers."""
    found = {name: Counted.together(of) for name, of in rounds.items()}
    cluster, large = calibrated(trainers, found), found["large"]
    counts = large.work
    played_s = cluster.pass_takes_s(
        *(of / counts.passes for of in (counts.tokens, counts.stages, counts.slices, counts.light, counts.pairs))
    )
    loads = {}
    for name in found:
        if LOADS[name].backwards > 1:
            continue
        mine, theirs = played(cluster, LOADS[name], played_s), measured(found[name], large)
        each = [measured(*of).off(theirs) for of in zip(rounds[name], rounds["large"], strict=True)]
        differ = {what: max(abs(off[what]) for off in each) for what in each[0]}
        told = {"played": asdict(mine), "measured": asdict(theirs), "off": mine.off(theirs)}
        loads[name] = told | {"rounds_differ": differ}
    rate = cluster.trained_tokens_per_s_per_gpu
    times = {"stage": cluster.pass_s, "slice": cluster.slice_s, "step": cluster.light_s, "token": 1 / rate}
    times |= {"pair": cluster.pair_s, "turnaround": cluster.turnaround_s}
    return {"cpu_ms": {name: 1e3 * of for name, of in times.items()}, "loads": loads,
            "counted": {name: {**asdict(one.work), "wall_s": one.wall_s} for name, one in found.items()}}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--trainers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="what is predicted")
    args = parser.parse_args()
    taken_with, cores = machine(), sorted(os.sched_getaffinity(0))
    most = max(args.trainers)
    if len(cores) < most + 2:
        parser.error(f"{most} trainers take {most + 2} cores, two for clients and servers; there are {len(cores)}")
    os.sched_setaffinity(0, cores[most:])  # and what is started from here
    with ExitStack() as stack:
        reals = {count: stack.enter_context(service(count, cores[:count])) for count in args.trainers}
        found = in_turns(reals, args.cases, args.rounds)
    results = {f"{trainers}": beside(trainers, found[trainers]) for trainers in found}
    claims = [
        claim(f"trainers: {trainers}, {name}: {what}", abs(off), TOLERANCE, abs(off) <= TOLERANCE)
        for trainers, result in results.items()
        for name in args.cases
        for what, off in result["loads"][name]["off"].items()
    ]
    told = {"bench": "simulate", "compares": "real trainers with simulated ones", "machine": taken_with}
    result = {**told, "trainers": results, "claims": claims}
    print(json.dumps(result) if args.json else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
