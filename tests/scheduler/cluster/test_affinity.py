"""Two generators and 40 adapters, in virtual time, on both carriers: samples go where their adapter is, which saves
reading adapters, and nobody waits for it."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest

from scheduler.links.contract import LEFT_S, FairQueue, Item
from tests.scheduler.cluster.conftest import Clock, Make

ADAPTERS, GROUPS, SLOTS, STEP_S = 40, 8, 32, 1 / 64


@dataclass
class Generator:
    """A generator that looks for work between two decode steps. `loads` counts the adapters that it had to read."""

    name: str
    free: int = SLOTS
    loads: int = 0
    held: set[str] = field(default_factory=set)
    ends: list[tuple[float, str, int]] = field(default_factory=list)


def played(queue: FairQueue, clock: Clock, requests: list[tuple[float, str]], *, affine: bool) -> tuple[int, float]:
    """The adapters that were read, and the mean seconds that a request waited. Requests are (arrival, adapter); each
    takes one slot for about a second."""
    workers, chance, began = [Generator("a"), Generator("b")], random.Random(1), clock.now_s
    coming, waited, left = list(reversed(requests)), 0.0, len(requests)
    arrivals: dict[str, tuple[float, str]] = {}
    while left:
        clock.now_s += STEP_S
        while coming and began + coming[-1][0] <= clock.now_s:
            at, adapter = coming.pop()
            name = f"{adapter}-{len(coming)}"
            arrivals[name] = began + at, adapter
            path = ("m", adapter.split("@")[0], "interactive", "lane")
            queue.push(Item(name, path, 100, adapter=adapter if affine else ""))
        for worker in chance.sample(workers, 2):
            while worker.ends and worker.ends[0][0] <= clock.now_s:
                _, name, epoch = heapq.heappop(worker.ends)
                assert queue.answer(name, epoch, b"")
                worker.free, left = worker.free + 1, left - 1
            for lease in queue.lease(worker.name, ["m"], worker.free, 1e6) if worker.free else []:
                at, adapter = arrivals[lease.id]
                waited += clock.now_s - at
                worker.free -= 1
                worker.loads += adapter not in worker.held
                worker.held.add(adapter)
                heapq.heappush(worker.ends, (clock.now_s + chance.uniform(0.5, 1.5), lease.id, lease.epoch))
    return sum(worker.loads for worker in workers), waited / len(requests)


def of_loops(step_s: float) -> list[tuple[float, str]]:
    """The requests of 40 runs: each step samples GROUPS requests from a new version, spread over half of `step_s`."""
    chance = random.Random(0)
    begins = {adapter: chance.uniform(0, step_s) for adapter in range(ADAPTERS)}
    return sorted(
        (begins[adapter] + step_s * (step + chance.uniform(0, 0.5)), f"{adapter}@{step}")
        for adapter in range(ADAPTERS)
        for step in range(2)
        for _ in range(GROUPS)
    )


@pytest.mark.parametrize(
    ("make_queue", "busy", "most"),
    [
        *(("local", 0.3, 0.6), ("local", 0.8, 0.85), ("local", 2.0, 1.0), ("redis", 0.8, 0.85)),
        pytest.param("redis", 0.3, 0.6, marks=pytest.mark.long),
        pytest.param("redis", 2.0, 1.0, marks=pytest.mark.long),
    ],
    indirect=["make_queue"],
)
def test_fewer_adapters_are_read_and_nobody_waits_longer_for_it(make_queue: Make, busy: float, most: float) -> None:
    """With these shares of all slots, at most the share `most` of the reads that there would be without affinity."""
    requests = of_loops(step_s=ADAPTERS * GROUPS * 1.0 / (2 * SLOTS * busy))
    found = {}
    for affine in (False, True):
        clock = Clock()
        found[affine] = played(make_queue(clock), clock, requests, affine=affine)
    (plain, plain_s), (loads, wait_s) = found[False], found[True]
    print(f"\nbusy {busy:.0%}: {plain} -> {loads} reads for {len(requests)} requests; {plain_s:.3f} -> {wait_s:.3f} s")
    assert ADAPTERS * 2 <= loads <= most * plain
    assert wait_s <= plain_s + LEFT_S
