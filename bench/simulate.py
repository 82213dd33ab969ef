"""The simulator's trainers beside real ones: what it has not been told, predicted within a tenth.

    python bench/simulate.py queues [--json] [--trainers 1 2] [--cases "uneven" ...]     # two minutes
    python bench/simulate.py costs [--json] [--rounds 8]                                  # one
    python bench/simulate.py together [--json] [--rounds 1]                               # one for a round

What becomes of a load follows from two things: who is in which pass, where and when; and what a pass takes. Each is
checked apart from the other, so that neither's error is hidden by the other's, and then both in one. `weftd simulate
--check` does so for generators.

- `queues`. Two embedded services, with one trainer and with two, all of it real but for the trainers' time: they wait
  instead of computing, for each stage as long as the simulator's machine takes for it
  (`bench/parts/waiting_trainers.py`). So two cores carry both services at once, with their clients, and nothing
  depends on how fast they are. A client's time between two steps is found with one client alone. The clients begin on
  fresh runs, one soon after the other, and what is counted of them is played on the virtual clock from its first
  second: tokens in a pass, the time of a pass, trained tokens per second, and what each tenant had of them (the part
  of all tokens that went to another tenant than was played; which of several tenants with the same load has less,
  where they cannot be even, is chance: the one that has most is beside the one that was played to have most, and so
  on).
- `costs`. A trainer in this process, on the model of `bench/parts/toy.py`: what a pass takes (`calibrate_trainer`),
  from six passes that differ in stages, slices, steps, tokens and lengths; then the time of five other passes. In
  processor time, all in turns, the median of the rounds.
- `together`. Trainers that compute, on the same model, in services with one and with two, in turns, with clients that
  trainers hardly ever wait for; their time between two steps is found as for `queues`, and what a pass takes as for
  `costs`. How fast the machine is meanwhile is found with one trainer: times are in those of a pass of the same load
  there, just before. Where there are fewer cores than trainers, clients and servers keep busy, all share them: what
  clients and servers take beside a trainer is found with one, and makes each pass of two as much longer. What two
  trainers do is compared as in `queues`.

Not compared: several ranks, whose collectives no CPU has the speed of; and what a run that moves takes to be saved and
read, which the simulator leaves out.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.parts.pass_costs import costs
from bench.parts.results import asked, at_most, machine, tell
from bench.parts.serving import BASE_MODEL, as_workers_run, serve
from bench.parts.toy import random_decoder, save_toy
from bench.parts.trained_loads import RANK, Counted, Load, Service
from bench.parts.waiting_trainers import PASS_TOKENS, TIMES
from scheduler.order.light_work import Sizes, SizesOf
from scheduler.simulator.calibration import calibrate_trainer
from scheduler.simulator.cluster import Cluster
from scheduler.simulator.simulation import Simulation
from scheduler.simulator.trainer import Work
from workers.model.card import config_card
from workers.model.tiny import TINY_PATH

TOLERANCE = 0.1
CONFIG = """
[trainer]
threads = 1
replicas = {trainers}
pass_tokens = {pass_tokens}
snapshot_every_tokens = 1000000
[generator]
threads = 1
"""
WAITING = (sys.executable, str(Path(__file__).parent / "parts" / "waiting_trainers.py"))
#: Seconds that a load runs before it is counted, and while it is counted.
WARM_S, COUNTED_S = 2.0, 9.0
#: How many starting moments within a second the simulated counts are averaged over.
SHIFTS = 16
QUEUES = {
    "three alike": Load([(1, 128)] * 3),
    "short sequences": Load([(2, 32)] * 8),
    "long sequences": Load([(1, 256)] * 4),
    "many tenants": Load([(1, 64)] * 16),
    "uneven": Load([(1, 32), (1, 32), (1, 64), (1, 128), (2, 128), (2, 128)]),
    "large ones together at first": Load([(2, 128), (1, 32)] * 3),
}
ALONE = Load([(1, 32)], in_flight=1)

#: Pass size in tokens for passes that are really computed.
LARGE_PASS = 2048
#: On a CPU torch's attention takes less time per pair the longer a sequence is (a quarter less at twice the length), so
#: loads for calibration have about the lengths of predicted ones.
CALIBRATING = {
    "alone": Load([(1, 32)], in_flight=1),
    "few": Load([(1, 64)] * 2),
    "many": Load([(1, 64)] * 8),
    "gathering": Load([(1, 64)] * 8, in_flight=1, backwards=4),
    "large": Load([(8, 128)] * 8),
    "long": Load([(3, 320)] * 4),
}
COSTS = {
    "three alike": Load([(4, 128)] * 3, in_flight=1),
    "short sequences": Load([(8, 32)] * 8),
    "long sequences": Load([(2, 512)] * 4),
    "many tenants": Load([(4, 64)] * 16),
    "uneven": Load([(2, 64), (2, 64), (4, 64), (4, 128), (8, 128), (8, 128)], in_flight=1),
}
#: Seconds that a load runs before it is counted, and while it is counted.
TOGETHER_WARM_S, TOGETHER_S = 2.0, 6.0
#: Rounds of calibration before.
TOGETHER_CALIBRATES = 2
TOGETHER = {
    "large": Load([(4, 128)] * 8),
    "uneven": Load([(2, 64), (2, 64), (4, 64), (4, 128), (8, 128), (8, 128)]),
}


@dataclass(frozen=True)
class Figures:
    """The figures of a load, simulated or measured."""

    tokens_of_a_pass: float
    pass_s: float
    tokens_per_s: float
    parts: list[float]

    @classmethod
    def of(cls, work: Work, wall_s: float, parts: Sequence[float]) -> Figures:
        return cls(work.tokens / work.passes, work.seconds / work.passes, work.tokens / wall_s, list(parts))

    def off(self, other: Figures) -> dict[str, float]:
        """Relative errors of these simulated figures; and the share of the tokens that went to other tenants."""
        names = {
            "tokens_of_a_pass": "tokens of a pass",
            "pass_s": "time of a pass",
            "tokens_per_s": "tokens per second",
        }
        found = {told: getattr(self, name) / getattr(other, name) - 1 for name, told in names.items()}
        parts = zip(self.parts, other.parts, strict=True)
        return found | {"went to others": sum(abs(mine - theirs) for mine, theirs in parts) / 2}


def played(cluster: Cluster, load: Load, sizes: SizesOf, warm_s: float, counted_s: float) -> Figures:
    """Simulated figures, counted from several moments around `warm_s`: a stage counts when it is over, and there are
    few."""
    work, wall_s, trained = Work(), 0.0, [0.0] * len(load.batches)
    for shift in range(-SHIFTS // 2, SHIFTS // 2):
        after_s = warm_s + shift / SHIFTS
        result = Simulation(cluster, load.workloads(), sizes=sizes).run(counted_s, after_s)
        work.add(result.trainers)
        wall_s += result.seconds
        trained = [sum(both) for both in zip(trained, (one.trained_tokens for one in result.tenants), strict=True)]
    return Figures.of(work, wall_s, load.parts(trained))


def sizes_on(path: Path) -> SizesOf:
    card = config_card("model", path)
    sizes = Sizes(card.adapter_parameters(RANK, True, True, True), card.config.active_parameters)
    return lambda spec: sizes


@contextmanager
def services(counts: Sequence[int], pass_tokens: int, model: str = "", **options: Any) -> Iterator[dict[int, Service]]:
    """Services by their number of trainers. `model`: a folder, or none for the built-in one."""
    found = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-bench-")))
        for trainers in counts:
            config = folder / f"{trainers}.toml"
            config.write_text(CONFIG.format(trainers=trainers, pass_tokens=pass_tokens))
            named = ("--model", f"toy={model}") if model else ()
            started = stack.enter_context(serve("--config", str(config), *named, **options))
            found[trainers] = Service(*started, base_model="toy" if model else BASE_MODEL)
        for real in found.values():
            real.settled()
        yield found


# ---- queues


def queues(counts: Sequence[int], cases: Sequence[str]) -> dict[str, Any]:
    with services(counts, PASS_TOKENS, program=WAITING) as reals, ThreadPoolExecutor(len(reals)) as pool:

        def go(trainers: int) -> dict[str, Any]:
            return waiting(trainers, reals[trainers], cases)

        return {f"{trainers}": found for trainers, found in zip(counts, pool.map(go, counts), strict=True)}


def waiting(trainers: int, real: Service, cases: Sequence[str]) -> dict[str, Any]:
    alone = real.counted(ALONE, 0.5, 3.0)
    one_s = TIMES.pass_takes_s(ALONE.tokens(0), slices=1, light=1, pairs=ALONE.pairs(0))
    turnaround_s = max(0.0, alone.wall_s / alone.work.light - one_s)
    cluster = replace(TIMES, trainers=trainers, turnaround_s=turnaround_s, request_s=alone.request_s)
    sizes, loads = sizes_on(TINY_PATH), {}
    for name in cases:
        found = real.counted(QUEUES[name], WARM_S, COUNTED_S)
        mine = played(cluster, QUEUES[name], sizes, WARM_S, COUNTED_S)
        loads[name] = beside(mine, Figures.of(found.work, found.wall_s, found.parts))
    return {"turnaround_s": turnaround_s, "request_s": alone.request_s, "loads": loads}


def beside(mine: Figures, theirs: Figures) -> dict[str, Any]:
    return {"played": asdict(mine), "measured": asdict(theirs), "off": mine.off(theirs)}


# ---- costs


def calibrated(rounds: int, cases: Mapping[str, Load]) -> tuple[Cluster, dict[str, Work]]:
    """The calibrated trainer of this machine, and the measurements of all loads."""
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        found = costs(random_decoder(), Path(folder), {**CALIBRATING, **cases}, LARGE_PASS, rounds)
    cluster = Cluster(replicas=1, gpus_per_replica=1, slots=1, pass_tokens=LARGE_PASS)
    return calibrate_trainer(cluster, [found[name] for name in CALIBRATING]), found


def takes_s(cluster: Cluster, work: Work) -> float:
    return cluster.pass_takes_s(work.tokens, work.stages, work.slices, work.light, work.pairs)


def of_costs(rounds: int) -> dict[str, Any]:
    cluster, found = calibrated(rounds, COSTS)
    rate = cluster.trained_tokens_per_s_per_gpu
    times = {"stage": cluster.pass_s, "slice": cluster.slice_s, "step": cluster.light_s, "token": 1 / rate}
    times |= {"pair": cluster.pair_s}
    off = {name: takes_s(cluster, work) / work.seconds - 1 for name, work in found.items()}
    loads = {name: {"counted": asdict(work), "off": {"time of a pass": off[name]}} for name, work in found.items()}
    return {"cpu_ms": {name: 1e3 * of for name, of in times.items()}, "loads": loads}


# ---- together


def together(rounds: int) -> dict[str, Any]:
    cluster, _ = calibrated(TOGETHER_CALIBRATES, {})
    turns: list[dict[tuple[int, str], Counted]] = []
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        toy = save_toy(Path(folder) / "toy")
        with services((1, 2), LARGE_PASS, str(toy)) as reals:
            for _ in range(rounds):
                turns.append({
                    (trainers, name): real.counted(load, TOGETHER_WARM_S, TOGETHER_S)
                    for name, load in (TOGETHER | {"alone": ALONE}).items()
                    for trainers, real in reals.items()
                    if trainers == 1 or name in TOGETHER
                })  # fmt: skip
        loads = [of_round(cluster, found, sizes_on(toy)) for found in turns]
    return {
        "rounds": loads,
        "loads": {name: {"off": middle([each[name]["off"] for each in loads])} for name in loads[0]},
    }


def of_round(cluster: Cluster, found: Mapping[tuple[int, str], Counted], sizes: SizesOf) -> dict[str, Any]:
    """The measurements with two trainers beside the simulation."""
    loads, alone = dict[str, Any](), found[1, "alone"]
    for name, load in TOGETHER.items():
        one, two = found[1, name], found[2, name]
        mine_s, theirs_s = takes_s(cluster, of_a_pass(one.work)), one.work.seconds / one.work.passes
        turnaround_s = (alone.wall_s - alone.work.seconds) / alone.work.light * mine_s / theirs_s
        by = max(1.0, 2 * (1 + one.others_cpu_s / one.trainers_cpu_s) / len(os.sched_getaffinity(0)))
        both = slower(replace(cluster, trainers=2, turnaround_s=turnaround_s, request_s=alone.request_s), by)
        mine = played(both, load, sizes, TOGETHER_WARM_S, TOGETHER_S)
        told = beside(in_passes(mine, mine_s), in_passes(Figures.of(two.work, two.wall_s, two.parts), theirs_s))
        counted = {"one": asdict(one), "two": asdict(two)}
        found_of_alone = {"turnaround_s": turnaround_s, "request_s": alone.request_s}
        loads[name] = told | {"slower": by, **found_of_alone, "counted": counted}
    return loads


def of_a_pass(work: Work) -> Work:
    return Work(1, *(of / work.passes for of in (work.stages, work.slices, work.light, work.tokens, work.pairs)))


def in_passes(of: Figures, unit_s: float) -> Figures:
    """The figures with times in units of `unit_s`."""
    return replace(of, pass_s=of.pass_s / unit_s, tokens_per_s=of.tokens_per_s * unit_s)


def slower(cluster: Cluster, by: float) -> Cluster:
    rate = cluster.trained_tokens_per_s_per_gpu / by
    names = ("pass_s", "slice_s", "light_s", "pair_s", "turnaround_s", "request_s")
    times = {name: getattr(cluster, name) * by for name in names}
    return replace(cluster, trained_tokens_per_s_per_gpu=rate, **times)


def middle(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each error."""
    return {what: median(off[what] for off in rounds) for what in rounds[0]}


# ----


def claims(part: str, loads: Mapping[str, Any], names: Iterable[str]) -> list[dict[str, Any]]:
    return [
        at_most(f"{part}, {name}: {what}", abs(off), TOLERANCE)
        for name in names
        for what, off in loads[name]["off"].items()
    ]


def main() -> None:
    parser = asked(__doc__)
    parser.add_argument("part", choices=("queues", "costs", "together"))
    parser.add_argument("--trainers", type=int, nargs="+", default=[1, 2], help="of queues")
    parser.add_argument("--cases", nargs="+", choices=QUEUES, default=list(QUEUES), help="of queues")
    parser.add_argument("--rounds", type=int, help="of costs (8), or together (1)")
    args = parser.parse_args()
    told: dict[str, Any] = {"bench": "simulate", "compares": "real trainers with simulated ones", "machine": machine()}
    held = []
    if args.part == "queues":
        told["trainers"] = queues(args.trainers, args.cases)
        for trainers, found in told["trainers"].items():
            held += claims(f"queues, {trainers} trainers", found["loads"], args.cases)
    elif args.part == "costs":
        told |= of_costs(args.rounds or 8)
        held = claims("costs", told["loads"], COSTS)
    else:
        told |= together(args.rounds or 1)
        held = claims("together, 2 trainers", told["loads"], TOGETHER)
    result = {**told, "claims": held}
    tell(result, args)


if __name__ == "__main__":
    as_workers_run()
    main()
