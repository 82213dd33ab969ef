"""How many operations a second one leader can lead: its trainers and generators do no work at all.

    python bench/leader.py [--json] [--quick]

Real Redis and PostgreSQL (as the tests start them, with fsync off: what is measured is our work, not the disk's), a
leader, REPLICAS more that accept what RUNS runs and SAMPLING clients ask for, and 8 trainers and 32 generators that
answer what they get, all over the real links (`bench/parts/leading.py`). Measured twice, anew each time:

- "apart", where this process may use four cores at least: leader, Redis and PostgreSQL (all its processes) on the first
  two of them; the load, which is the accepting replicas with their clients and the process of all workers, on the
  others. With fewer cores (`taskset` may have left fewer) it is not measured, and the result says so. The goal is for
  this one.
- "together": all of it on the first two cores, the load as well.

The rate tells of the leader only where nobody else uses its cores. So beside it stands what became of them: what we
used, what others did, and what was idle, because somebody waited for somebody else; and the rate for which the
processor time would do, with each process on one core at a time.

What is on which core is set before a process starts (`sched_setaffinity`, which its threads and children inherit), and
what the kernel says of it afterwards is in the result. Beside the rate stands the processor time that each process
takes for an operation. An operation is counted when its client has its outcome.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import psutil
import uvloop
from msgspec.structs import replace

from bench.parts.leading import REPLICAS, Places, ask, lead, set_up, work
from bench.parts.results import asked, at_least, machine, tell
from migrations.upgrade import migrate
from store.database.db import Database
from tests.servers import postgres_server, redis_server

GOAL_PER_S = 2000
#: How many cores leader, Redis and PostgreSQL get; and how many the machine must have so that the load runs on others.
CORES, ENOUGH_CORES = 2, 4
#: The measured roles; the others are the load.
LED = ("leader", "redis", "postgresql")


@contextmanager
def on(cores: set[int]) -> Iterator[None]:
    """Processes started in the block run on these cores only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def process(role: str, places: Places) -> Iterator[subprocess.Popen[str]]:
    """One of the processes, once it is ready."""
    command = [sys.executable, __file__, "--role", role, "--places", msgspec.json.encode(places).decode()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        assert started.stdin is not None
        try:
            if started.stdout.readline() != "ready\n":
                raise RuntimeError(f"the {role} did not start")
            yield started
        finally:
            started.stdin.close()
            started.wait(60)
    if started.returncode:
        raise RuntimeError(f"the {role} failed")


def family(pid: int) -> list[psutil.Process]:
    """A process and its children."""
    here = psutil.Process(pid)
    return [here, *here.children(recursive=True)]


def cpu_s(pids: list[int]) -> float:
    """Processor time so far, of processes and their children."""
    times = [one.cpu_times() for pid in pids for one in family(pid)]
    return sum(time.user + time.system for time in times)


def cores_of(pids: list[int]) -> list[int]:
    """The cores on which processes and their children may run, by the kernel's account."""
    return sorted({core for pid in pids for one in family(pid) for core in os.sched_getaffinity(one.pid)})


def busy_s(cores: set[int]) -> float:
    """Time that these cores were busy so far, with any process."""
    times = [one for core, one in enumerate(psutil.cpu_times(percpu=True)) if core in cores]
    return sum(sum(one) - one.guest - one.guest_nice - one.idle - one.iowait for one in times)


def took(cores: set[int], before_s: float, seconds: float, ours_s: float) -> dict[str, float]:
    """How the cores were used in that time, in cores."""
    busy, ours = (busy_s(cores) - before_s) / seconds, ours_s / seconds
    return {"ours": ours, "others": max(0.0, busy - ours), "idle": len(cores) - busy}


def allowed_per_s(cpu_ms: dict[str, float]) -> float:
    """The rate that the processor time of leader, Redis and PostgreSQL would allow, on CORES cores together. The first
    two are single-threaded processes, so each has at most one core."""
    ms = [cpu_ms[role] for role in LED]
    return 1e3 / max(sum(ms) / CORES, *ms[:2])


def measure(seconds: float, led: set[int], load: set[int]) -> dict[str, Any]:
    """Measure with leader, Redis and PostgreSQL on the cores `led`, and everything else on `load`."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-bench-"))
        with on(led):
            postgres, redis = stack.enter_context(postgres_server()), stack.enter_context(redis_server())
        places = Places(folder, postgres.url(postgres.create()), redis, seconds)
        database = Database(places.database)
        migrate(database)
        database.write_now(set_up)
        database.close()
        started = {}
        for role in ("leader", "workers", "clients"):
            parts = range(REPLICAS if role == "clients" else 1)
            with on(led if role in LED else load):
                started[role] = [stack.enter_context(process(role, replace(places, part=part))) for part in parts]
        pids = {role: [one.pid for one in several] for role, several in started.items()}
        pids |= _servers(places.redis, postgres.port)
        before = {role: cpu_s(some) for role, some in pids.items()}
        began, busy = time.monotonic(), busy_s(led)
        for one in started["clients"]:
            _tell(one, "go")
        counts = Counter[str]()
        for one in started["clients"]:
            counts.update(json.loads(_line(one)))
        spent = {role: cpu_s(some) - before[role] for role, some in pids.items()}
        ours = sum(spent[role] for role in (spent if led == load else LED))
        led_cores = took(led, busy, time.monotonic() - began, ours)
        cores = {role: cores_of(some) for role, some in pids.items()}
    total = counts.total()
    cpu_ms = {role: 1e3 * taken / total for role, taken in spent.items()}
    return {
        "operations_per_s": total / seconds,
        **{f"{name}_per_s": count / seconds for name, count in counts.items()},
        "cpu_ms_per_operation": cpu_ms,
        "cpu_allows_per_s": allowed_per_s(cpu_ms),
        "led_cores": led_cores,
        "cores": cores,
    }


def _tell(one: subprocess.Popen[str], word: str) -> None:
    assert one.stdin is not None
    one.stdin.write(f"{word}\n")
    one.stdin.flush()


def _line(one: subprocess.Popen[str]) -> str:
    assert one.stdout is not None
    return one.stdout.readline()


def _servers(redis: str, postgres_port: int) -> dict[str, list[int]]:
    """The processes that listen on that port."""
    ports = {int(redis.rsplit(":", 1)[1].split("/")[0]): "redis", postgres_port: "postgresql"}
    found = (c for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port in ports)
    return {ports[c.laddr.port]: [c.pid] for c in found if c.pid is not None}


def compare(seconds: float) -> dict[str, Any]:
    """Both measurements. `apart` is None if there are too few cores."""
    cores = sorted(os.sched_getaffinity(0))
    led, load = set(cores[:CORES]), set(cores[CORES:])
    apart = measure(seconds, led, load) if len(cores) >= ENOUGH_CORES else None
    together = measure(seconds, led, led)
    allowed = (apart or together)["cpu_allows_per_s"]
    name = "operations per second that two cores have processor time for: leader, Redis and PostgreSQL"
    claims = [at_least(name, allowed, GOAL_PER_S)]
    if apart is not None:
        rate = apart["operations_per_s"]
        name = "operations per second: leader, Redis and PostgreSQL on two cores, the load on others"
        claims.append(at_least(name, rate, GOAL_PER_S))
    lacking = "" if apart else f"apart: it needs {ENOUGH_CORES} cores, and this process may use {len(cores)}"
    return {"apart": apart, "together": together, "not_measured": lacking, "claims": claims}


def main() -> None:
    parser = asked(__doc__, quick="a shorter time")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--places", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        gc.freeze()  # as the programs do
        places = msgspec.json.decode(args.places, type=Places)
        if args.role == "workers":
            work(places)
        else:
            uvloop.run(lead(places) if args.role == "leader" else ask(places))  # as uvicorn does
        return
    result = {
        "bench": "leader",
        "compares": "one leader with 8 trainers and 32 generators that do no work, the load on other cores and not",
        "machine": machine(),
        **compare(5.0 if args.quick else 20.0),
    }
    tell(result, args)


if __name__ == "__main__":
    main()
