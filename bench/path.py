"""The whole path through the official SDK: what an operation costs, and what sharing the service costs.

    python bench/path.py [--json] [--quick]

Starts one real `weftd` with the built-in model and drives it with unmodified `tinker` clients in this process, so
client and server share the machine's cores; every figure includes both, but those under `light_clients`.

- Round trip of an empty optim_step (submit, execute, commit, long poll) and of get_info over plain HTTP.
- Operations per second of 16 clients that each keep one empty optim_step in flight.
- The same two of clients that cost next to nothing, in a process of their own (`bench/parts/light_client.py`), with the
  processor time that each of the server's processes takes for an operation: the best of five rounds, which are told.
- Training and sampling tokens per second, 1 and 16 tenants, the same total work.
- A small forward submitted behind a neighbour's four batches of 32 x 128 tokens: what it waits beyond its round trip
  alone, as a share of the time of one such batch (one batch is one pass). It is submitted at different moments of the
  running pass; the claim is about the median.
- The same empty optim_step with 64 more runs registered: there is no adapter limit whose size costs anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import tinker
from tinker import types

from bench.parts.data import batch
from bench.parts.light_client import Run, measure
from bench.parts.results import asked, at_least, at_most, claim, machine, percentile, tell
from bench.parts.serving import BASE_MODEL, make_key, serve

ADAM = types.AdamParams(learning_rate=1e-4)
#: Of light clients, whose figures are the machine's before they are the server's.
ROUNDS = 5


def timed(work: Callable[[], object], times: int) -> list[float]:
    """Wall seconds of each of `times` calls, after one that is not counted."""
    work()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return taken


def step(run: Any, data: list[types.Datum]) -> None:
    backward = run.forward_backward(data, "cross_entropy")
    update = run.optim_step(ADAM)
    backward.result()
    update.result()


def together(works: list[Callable[[], object]]) -> float:
    """Wall seconds until all have run, each in a thread of its own."""
    start = time.perf_counter()
    with ThreadPoolExecutor(len(works)) as pool:
        for future in [pool.submit(work) for work in works]:
            future.result()
    return time.perf_counter() - start


def round_trips(run: Any, url: str, key: str, times: int) -> dict[str, float]:
    optim = timed(lambda: run.optim_step(ADAM).result(), times)
    with httpx.Client(base_url=url, headers={"X-API-Key": key}) as http:
        body = {"model_id": run.model_id, "type": "get_info"}
        info = timed(lambda: http.post("/api/v1/get_info", json=body).raise_for_status(), times)
    return {
        "optim_step_p50_ms": 1e3 * percentile(optim, 0.5),
        "optim_step_p95_ms": 1e3 * percentile(optim, 0.95),
        "get_info_p50_ms": 1e3 * percentile(info, 0.5),
        "get_info_p95_ms": 1e3 * percentile(info, 0.95),
    }


def light_clients(runs: list[Run], url: str, server: int, seconds: float) -> dict[str, Any]:
    """The first of these fresh runs alone, then all, in turn. What others on the machine take varies by the second: of
    each figure the best of the rounds counts."""
    alone: list[tuple[list[float], dict[str, float]]] = []
    together: list[tuple[list[float], dict[str, float]]] = []
    for _ in range(ROUNDS):
        taken_ms, cpu_ms, runs[:1] = measure(url, server, seconds / ROUNDS, runs[:1])
        alone.append((taken_ms, cpu_ms))
        taken_ms, cpu_ms, runs = measure(url, server, seconds / ROUNDS, runs)
        together.append((taken_ms, cpu_ms))
    alone_ms, alone_cpu_ms = min(alone, key=lambda found: percentile(found[0], 0.5))
    rates = [len(taken_ms) * ROUNDS / seconds for taken_ms, _ in together]
    return {
        "optim_step_p50_ms": percentile(alone_ms, 0.5),
        "optim_step_p95_ms": percentile(alone_ms, 0.95),
        "optim_step_cpu_ms": alone_cpu_ms,
        "operations_per_s_16_clients": max(rates),
        "operations_per_s_of_rounds": [round(rate) for rate in rates],
        "cpu_ms_16_clients": together[rates.index(max(rates))][1],
    }


def throughput(runs: list[Any], repeats: int) -> dict[str, float]:
    """Tokens per second of all runs together; every tenant brings the same work."""
    data = batch(16, 64)
    prompt, params = types.ModelInput.from_ints(list(range(20, 52))), types.SamplingParams(max_tokens=32, seed=1)
    samplers = [run.save_weights_and_get_sampling_client().result() for run in runs]
    each = max(1, 16 // len(runs)) * repeats

    def train(run: Any) -> None:
        for _ in range(each):
            step(run, data)

    def sample(sampler: Any) -> int:
        futures = [sampler.sample(prompt, 4, params) for _ in range(each)]
        return sum(len(s.tokens) for f in futures for s in f.result().sequences)

    together([lambda run=run: step(run, data) for run in runs])
    train_s = together([lambda run=run: train(run) for run in runs])
    generated: list[int] = []
    sample_s = together([lambda s=s: generated.append(sample(s)) for s in samplers])
    return {
        "train_tokens_per_s": len(runs) * each * 16 * 64 / train_s,
        "sample_tokens_per_s": sum(generated) / sample_s,
    }


def behind_a_neighbour(small: Any, neighbour: Any, repeats: int) -> dict[str, float]:
    """How long a small forward waits when four large batches were submitted just before it."""
    tiny, large = batch(1, 16), batch(32, 128)
    alone = min(timed(lambda: small.forward(tiny, "cross_entropy").result(), 5))
    one_batch = min(timed(lambda: neighbour.forward_backward(large, "cross_entropy").result(), 3))
    waits = []
    for turn in range(repeats):
        flood = [neighbour.forward_backward(large, "cross_entropy") for _ in range(4)]
        time.sleep((turn + 0.5) / repeats * one_batch)
        start = time.perf_counter()
        small.forward(tiny, "cross_entropy").result()
        waits.append(time.perf_counter() - start)
        for future in flood:
            future.result()
    waited = percentile(waits, 0.5)
    return {
        "alone_s": alone,
        "one_batch_s": one_batch,
        "waited_s": waited,
        "passes_waited": (waited - alone) / one_batch,
    }


def main() -> None:
    args = asked(__doc__, quick="fewer repetitions").parse_args()
    times, repeats = (40, 1) if args.quick else (200, 3)
    with serve() as (url, data_dir):
        keys = [make_key(data_dir, f"tenant-{i}") for i in range(16)]
        clients = [tinker.ServiceClient(base_url=url, api_key=key) for key in keys]
        runs = [c.create_lora_training_client(BASE_MODEL, rank=8).result() for c in clients]
        trips = round_trips(runs[0], url, keys[0], times)
        elapsed = together([lambda run=run: timed(lambda: run.optim_step(ADAM).result(), times // 4) for run in runs])
        fresh = [c.create_lora_training_client(BASE_MODEL, rank=8).result().model_id for c in clients]
        light = light_clients(
            [(key, run_id, 1) for key, run_id in zip(keys, fresh, strict=True)],
            url,
            int((data_dir / "server.lock").read_text().split()[0]),
            times / 10,
        )
        one, sixteen = throughput(runs[:1], repeats), throughput(runs, repeats)
        wait = behind_a_neighbour(runs[0], runs[1], 2 * repeats + 1)
        before = percentile(timed(lambda: runs[0].optim_step(ADAM).result(), times), 0.5)
        idle = [clients[0].create_lora_training_client(BASE_MODEL, rank=32).result() for _ in range(64)]
        after = percentile(timed(lambda: runs[0].optim_step(ADAM).result(), times), 0.5)
        del idle
    many = light["operations_per_s_16_clients"]
    result = {
        "bench": "path",
        "compares": "unmodified tinker clients against one weftd, client and server on the same cores",
        "machine": machine(),
        **trips,
        "operations_per_s_16_clients": 16 * (times // 4 + 1) / elapsed,
        "light_clients": light,
        "one_tenant": one,
        "sixteen_tenants": sixteen,
        "small_behind_large": wait,
        "optim_step_p50_ms_with_64_more_runs": 1e3 * after,
        "claims": [
            claim("empty optim_step p50 ms", trips["optim_step_p50_ms"], 10, trips["optim_step_p50_ms"] < 10),
            claim("the same of a light client", light["optim_step_p50_ms"], 5, light["optim_step_p50_ms"] < 5),
            at_least("operations per second of 16 light clients, best of five rounds", many, 1000),
            at_most("passes a small forward waits behind four large batches", wait["passes_waited"], 1.0),
            at_most("optim_step with 64 more runs / without", after / before, 1.15),
        ],
    }
    tell(result, args)


if __name__ == "__main__":
    main()
