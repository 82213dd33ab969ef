"""How well tenants fill each other's gaps: slots of the generator, whole RL loops, and samples in flight.

    python bench/backfill.py --json

Eight tenants sample batches in which one sequence is six times as long as the others, and train on nothing; slots are
counted, all of them and those while requests wait. The loops sample, train with importance sampling, step, and sample
the new weights. One tenant and eight take turns, for `ROUNDS`. Clients and server share the machine's cores.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import weft
from weft import types

from bench.parts.results import asked, at_least, claim, machine, tell
from bench.parts.serving import BASE_MODEL, make_key, serve

SLOTS = 32
#: How many tokens each of a batch's groups draws, each of eight sequences; the last group keeps its tenant waiting.
STRAGGLING = (40, 40, 40, 40, 40, 40, 40, 240)
GROUP = 8
SAMPLES_IN_FLIGHT = 2000
ROUNDS = 2
#: Seconds between two looks at the server. Its generator reports twice a second, so a new count may be this many looks
#: old.
LOOK_S = 0.25
REPORTED_LOOKS = 2


class Watch:
    """The server's counts between two moments: all of them, and those while requests waited."""

    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.Client(base_url=url, headers={"X-API-Key": key}, timeout=60)
        self.busy = self.offered = self.waiting_busy = self.waiting_offered = 0

    def look(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._http.get("/api/v1/weft/stats").json()
        return answer

    def during(self, over: threading.Event) -> None:
        """Watch until `over`."""
        before, waiting = self.look(), 0
        while not over.wait(LOOK_S):
            now = self.look()
            waiting = waiting + 1 if now["queue"]["open"] > now["queue"]["running"] else 0
            busy, offered = (now["generator"][n] - before["generator"][n] for n in ("slots_busy", "slots_offered"))
            self.busy, self.offered = self.busy + busy, self.offered + offered
            if waiting > REPORTED_LOOKS:
                self.waiting_busy, self.waiting_offered = self.waiting_busy + busy, self.waiting_offered + offered
            before = now

    def shares(self) -> dict[str, float]:
        return {
            "occupancy": self.busy / max(1, self.offered),
            "while_work_waits": self.waiting_busy / max(1, self.waiting_offered),
            "share_of_time_with_work_waiting": self.waiting_offered / max(1, self.offered),
        }


def together(loops: Sequence[Callable[[], float]]) -> float:
    """Run all at once; returns the sum of what they return. Raises what any of them raises."""
    results: list[float] = []
    errors: list[BaseException] = []

    def run(loop: Callable[[], float]) -> None:
        try:
            results.append(loop())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(loop,)) for loop in loops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sum(results)


def prompt(seed: int, length: int = 16) -> types.ModelInput:
    return types.ModelInput.from_ints([(31 * seed + 7 * i) % 200 + 30 for i in range(length)])


def straggle(sampler: weft.SamplingClient, tenant: int, until: float) -> int:
    """Sample batch after batch; returns the tokens of those that ended in time."""
    tokens = batch = 0
    while time.monotonic() < until:
        batch += 1
        futures = [
            sampler.sample(
                prompt(tenant * 1000 + batch),
                1 if length == max(STRAGGLING) else GROUP,
                types.SamplingParams(max_tokens=length, seed=i, stop=[]),
            )
            for i, length in enumerate(STRAGGLING)
        ]
        tokens += sum(len(sequence.tokens) for future in futures for sequence in future.result().sequences)
    return tokens


def occupied(watch: Watch, samplers: Sequence[weft.SamplingClient], seconds: float) -> None:
    """Let the tenant of each sampler straggle for that time, and watch."""
    over = threading.Event()
    watching = threading.Thread(target=watch.during, args=(over,))
    until = time.monotonic() + seconds
    timer = threading.Timer(seconds, over.set)
    watching.start()
    timer.start()
    together([lambda s=s, n=n: straggle(s, n, until) for n, s in enumerate(samplers)])
    watching.join()


def rl_loop(training: weft.TrainingClient, tenant: int, seconds: float) -> float:
    """Sample eight groups of four, train, step, and again, until the step under way at `seconds` is over; output tokens
    per second."""
    begun = time.monotonic()
    sampler = training.save_weights_and_get_sampling_client().result()
    tokens = step = 0
    while time.monotonic() < begun + seconds:
        step += 1
        asked = [prompt(tenant * 100 + step * 8 + i) for i in range(8)]
        params = [types.SamplingParams(max_tokens=64 if i == 7 else 16, seed=step, stop=[]) for i in range(8)]
        futures = [sampler.sample(given, 4, of) for given, of in zip(asked, params, strict=True)]
        data = []
        for given, future in zip(asked, futures, strict=True):
            for i, sequence in enumerate(future.result().sequences):
                tokens += len(sequence.tokens)
                data.append(datum(given.to_ints(), sequence, 1.0 if i % 2 else -1.0))
        backward = training.forward_backward(data, "importance_sampling")
        training.optim_step(types.AdamParams(learning_rate=1e-4)).result()
        backward.result()
        sampler = training.save_weights_and_get_sampling_client().result()
    return tokens / (time.monotonic() - begun)


def datum(given: list[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    tokens, masked = given + list(sequence.tokens), len(given) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * masked + list(sequence.logprobs or []),
            "advantages": [0.0] * masked + [advantage] * len(sequence.tokens),
        },
    )


def in_flight(sampler: weft.SamplingClient) -> dict[str, float]:
    begun = time.monotonic()
    params = types.SamplingParams(max_tokens=4, stop=[])
    futures = [sampler.sample(prompt(i), 1, params) for i in range(SAMPLES_IN_FLIGHT)]
    ended = sum(len(future.result(timeout=150).sequences[0].tokens) == 4 for future in futures)
    return {"sent": SAMPLES_IN_FLIGHT, "ended": ended, "seconds": time.monotonic() - begun}


def main() -> None:
    args = asked(__doc__, quick="a few seconds of each").parse_args()
    seconds = 3.0 if args.quick else 10.0
    with serve() as (url, data_dir):
        keys = [make_key(data_dir, f"tenant-{i}") for i in range(8)]
        services = [weft.ServiceClient(base_url=url, api_key=key) for key in keys]
        samplers = [service.create_sampling_client(base_model=BASE_MODEL).result() for service in services]
        watches = {clients: Watch(url, keys[0]) for clients in (1, 8)}
        straggle(samplers[0], 0, time.monotonic() + 1)  # warm
        for _ in range(ROUNDS):
            for clients, watch in watches.items():
                occupied(watch, samplers[:clients], seconds)
        runs = [
            service.create_lora_training_client(base_model=BASE_MODEL, rank=8, seed=i).result()
            for i, service in enumerate(services)
        ]
        rates = {1: 0.0, 8: 0.0}
        for _ in range(ROUNDS):
            for clients in rates:
                some = runs[:clients]
                rates[clients] += (
                    together([lambda r=r, n=n: rl_loop(r, n, seconds) for n, r in enumerate(some)]) / ROUNDS
                )
        flight = in_flight(samplers[0])
    alone, shared = watches[1].shares(), watches[8].shares()
    result = {
        "bench": "backfill",
        "compares": "Weft's own clients against one weftd, client and server on the same cores",
        "machine": machine(),
        "slots": SLOTS,
        "one_tenant_alone": alone,
        "eight_tenants": shared,
        "rl_output_tokens_per_s": {"1 client": rates[1], "8 clients": rates[8], "ratio": rates[8] / rates[1]},
        "in_flight": flight,
        "claims": [
            at_least("occupancy of slots, 8 tenants, while work waits", shared["while_work_waits"], 0.95),
            claim("samples in flight without error", flight["ended"], 2000, flight["ended"] == SAMPLES_IN_FLIGHT),
        ],
    }
    tell(result, args)


if __name__ == "__main__":
    main()
