"""Training loads on a real service: their clients, the work, and what is counted."""

from __future__ import annotations

import json
import math
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import weft
from weft.types import AdamParams, Datum, ModelInput

from bench.parts.serving import cpu_s, make_keys
from scheduler.simulator.trainer import Work
from scheduler.simulator.workloads import Workload

TENANTS, RANK = 16, 8
#: Processor time per second that an idle server takes at most.
SETTLED_CPU_S = 0.15
ADAM = AdamParams(learning_rate=1e-4)
#: Seconds between the first operations of two clients: the trainer of a run depends on the order of arrival, and the
#: simulator uses the order in the load.
APART_S = 0.03


@dataclass(frozen=True)
class Load:
    """Each client trains on a batch of (sequences, length) again and again: `backwards` forward_backwards and a step,
    with `in_flight` of these under way. A batch is one slice."""

    batches: Sequence[tuple[int, int]]
    in_flight: int = 2
    backwards: int = 1

    def tokens(self, tenant: int) -> int:
        """Tokens of a batch."""
        return math.prod(self.batches[tenant])

    def pairs(self, tenant: int) -> int:
        sequences, length = self.batches[tenant]
        return sequences * length**2

    def parts(self, tokens: Sequence[float]) -> list[float]:
        """The share of all tokens that each tenant had, in the order of their batches."""
        ordered = sorted(zip(self.batches, tokens, strict=True))
        return [part / sum(tokens) for _, part in ordered]

    def workloads(self) -> list[Workload]:
        """The load in the simulator's form."""
        assert self.backwards == 1
        loop = Workload("loop", 1, prompt=0, samples=False, overlap=self.in_flight - 1)
        return [
            replace(loop, group_size=sequences, lengths=(length,), begins_s=number * APART_S)
            for number, (sequences, length) in enumerate(self.batches)
        ]


@dataclass
class Pass:
    """A pass that was computed, from the timings of its operations; times in seconds since 1970."""

    tokens: int
    began_s: float = math.inf
    ended_s: float = 0.0
    backwards: Counter[int] = field(default_factory=Counter)  # by tenant
    steps: Counter[int] = field(default_factory=Counter)  # by tenant
    stages: set[int] = field(default_factory=set)

    def join(self, tenant: int, kind: str, begins_s: float, ends_s: float) -> None:
        """Add an operation. Operations come in a run's order, and each tenant has one run at a time."""
        self.began_s, self.ended_s = min(self.began_s, begins_s), max(self.ended_s, ends_s)
        if kind == "optim_step":
            self.steps[tenant] += 1
        elif kind == "forward_backward":
            self.backwards[tenant] += 1
            self.stages.add(self.steps[tenant])


@dataclass
class Counted:
    """What a load did in `wall_s`: `work`, whose seconds are those of passes; the tenants' shares (`Load.parts`);
    processor time of the trainers and of all `others`; and the median time between two requests that a client sends
    without waiting."""

    work: Work
    wall_s: float
    parts: list[float]
    trainers_cpu_s: float
    others_cpu_s: float
    request_s: float

    @classmethod
    def of(cls, load: Load, began: Mark, ended: Mark, passes: Sequence[Pass], request_s: float) -> Counted:
        """Count the passes. A pass that was partly within the time counts in part."""
        work, tokens = Work(), [0.0] * len(load.batches)
        for one in passes:
            inside_s = min(one.ended_s, ended.at_s) - max(one.began_s, began.at_s)
            if inside_s <= 0:
                continue
            share = inside_s / (one.ended_s - one.began_s)
            pairs = sum(of * load.pairs(tenant) for tenant, of in one.backwards.items())
            counts = one.backwards.total(), one.steps.total(), one.tokens, pairs
            work.add(Work(*(share * count for count in (one.tokens > 0, len(one.stages), *counts)), seconds=inside_s))
            for tenant, of in one.backwards.items():
                tokens[tenant] += share * of * load.tokens(tenant)
        spent = ended.cpu_s - began.cpu_s
        wall_s = ended.at_s - began.at_s
        return cls(work, wall_s, load.parts(tokens), spent["trainers"], spent["others"], request_s)


@dataclass(frozen=True)
class Mark:
    """A moment, in seconds since 1970, and the processor time until then."""

    at_s: float
    cpu_s: Counter[str]


class Service:
    """A server with its trainers, and its clients in this process."""

    def __init__(self, url: str, data_dir: Path, base_model: str) -> None:
        self._url, self._base_model = url, base_model
        self._database = data_dir / "weft.db"
        self._server = int((data_dir / "server.lock").read_text().split()[0])
        self._keys = make_keys(data_dir, [f"tenant-{i}" for i in range(TENANTS)])

    def settled(self) -> None:
        """Wait until all processes of the server have loaded their programs."""
        before = self._mark()
        while True:
            time.sleep(1)
            now = self._mark()
            if (now.cpu_s - before.cpu_s).total() < SETTLED_CPU_S:
                return
            before = now

    def counted(self, load: Load, warm_s: float, counted_s: float) -> Counted:
        """Let all clients of a load work on fresh runs, which begin one after another and are deleted afterwards; count
        after `warm_s`."""
        over, together = threading.Event(), threading.Barrier(len(load.batches) + 1)
        with ExitStack() as stack, ThreadPoolExecutor(len(load.batches)) as pool:
            runs = []
            for key in self._keys[: len(load.batches)]:
                client = stack.enter_context(weft.ServiceClient(base_url=self._url, api_key=key))
                runs.append(client.create_lora_training_client(self._base_model, rank=RANK).result())
            stack.callback(over.set)
            working = [pool.submit(_train, load, number, run, together, over) for number, run in enumerate(runs)]
            together.wait()
            time.sleep(warm_s)
            began = self._mark()
            time.sleep(counted_s)
            ended = self._mark()
            over.set()
            for work in working:
                work.result()
        passes, request_s = self._passes(began.at_s - warm_s)
        return Counted.of(load, began, ended, passes, request_s)

    def _mark(self) -> Mark:
        own, spent = psutil.Process().cpu_times(), cpu_s(self._server)
        others = spent["server"] + own.user + own.system
        return Mark(time.time(), Counter({"trainers": spent["trainers"], "others": others}))

    def _passes(self, since_s: float) -> tuple[list[Pass], float]:
        """The passes with operations accepted since `since_s`; and the median time between the acceptances of a step
        and of the operation before it."""
        found, apart_s, before_s = dict[int, Pass](), list[float](), math.nan
        with closing(sqlite3.connect(self._database)) as database:
            asked = (
                "SELECT organisations.name, kind, accepted_at, timings FROM operations"
                " JOIN organisations ON organisations.id = org_id WHERE timings IS NOT NULL ORDER BY lane, seq"
            )
            for tenant, kind, accepted_at, timings in database.execute(asked):
                accepted_s = datetime.fromisoformat(accepted_at).replace(tzinfo=UTC).timestamp()
                if accepted_s < since_s:
                    continue
                if kind == "optim_step":
                    apart_s.append(accepted_s - before_s)
                before_s = accepted_s
                for number, begins_us, ends_us, _, _, tokens in json.loads(timings)["stretches"]:
                    one, name = found.setdefault(number, Pass(tokens)), int(tenant.removeprefix("tenant-"))
                    one.join(name, kind, accepted_s + begins_us / 1e6, accepted_s + ends_us / 1e6)
        return list(found.values()), median(apart_s)


def _train(
    load: Load, number: int, run: weft.TrainingClient, together: threading.Barrier, over: threading.Event
) -> None:
    data, open_steps = batch(*load.batches[number], seed=number), deque[list[Any]]()
    together.wait()
    time.sleep(APART_S * number)
    while not over.is_set():
        if len(open_steps) == load.in_flight:
            _end(open_steps.popleft())
        gathered = [run.forward_backward(data, "cross_entropy") for _ in range(load.backwards)]
        open_steps.append([*gathered, run.optim_step(ADAM)])
    for step in open_steps:
        _end(step)


def _end(step: list[Any]) -> None:
    for future in step:
        future.result()


def batch(sequences: int, length: int, seed: int) -> list[Datum]:
    def datum(number: int) -> Datum:
        tokens = [(seed + 7 * number + 13 * place) % 500 + 20 for place in range(length + 1)]
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * length}
        return Datum(ModelInput.from_ints(tokens[:-1]), inputs)

    return [datum(number) for number in range(sequences)]
