"""How well tenants fill each other's gaps: slots of the generator, whole RL loops, and samples in flight.

    python bench/backfill.py --json

Eight tenants sample batches in which one sequence is six times as long as the others, and train on nothing: slots are
counted only while requests wait. The loops sample, train with importance sampling, step, and sample the new weights.
Clients and server share the machine's cores.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import weft
from serving import BASE_MODEL, claim, machine, make_key, serve
from weft import types

SLOTS = 32
#: Tokens of a batch's groups, of eight sequences each but for the last, which keeps its tenant waiting.
STRAGGLING = (40, 40, 40, 40, 40, 40, 40, 240)
GROUP = 8
SAMPLES_IN_FLIGHT = 2000


class Watch:
    """The server's counts between two moments, all of them, and those of the times in which requests waited."""

    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.Client(base_url=url, headers={"X-API-Key": key}, timeout=60)
        self.busy = self.offered = self.waiting_busy = self.waiting_offered = 0

    def look(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._http.get("/api/v1/weft/stats").json()
        return answer

    def during(self, over: threading.Event) -> None:
        """Watch until `over`."""
        before, waited = self.look(), False
        while not over.wait(0.25):
            now = self.look()
            waits = now["queue"]["open"] > now["queue"]["running"]
            busy, offered = (now["generator"][n] - before["generator"][n] for n in ("slots_busy", "slots_offered"))
            self.busy, self.offered = self.busy + busy, self.offered + offered
            if waits and waited:
                self.waiting_busy, self.waiting_offered = self.waiting_busy + busy, self.waiting_offered + offered
            before, waited = now, waits


def together(loops: Sequence[Callable[[], int]]) -> int:
    """Run all at once; the sum of what they return. Raises what any of them raises."""
    results: list[int] = []
    errors: list[BaseException] = []

    def run(loop: Callable[[], int]) -> None:
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
    """Batch after batch; the tokens of those that ended in time."""
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


def occupancy(url: str, key: str, services: Sequence[weft.ServiceClient], seconds: float) -> dict[str, float]:
    samplers = [service.create_sampling_client(base_model=BASE_MODEL).result() for service in services]
    watch, over = Watch(url, key), threading.Event()
    watching = threading.Thread(target=watch.during, args=(over,))
    until = time.monotonic() + seconds
    timer = threading.Timer(seconds, over.set)
    watching.start()
    timer.start()
    tokens = together([lambda s=s, n=n: straggle(s, n, until) for n, s in enumerate(samplers)])
    watching.join()
    return {
        "occupancy": watch.busy / max(1, watch.offered),
        "while_work_waits": watch.waiting_busy / watch.waiting_offered if watch.waiting_offered else 0.0,
        "share_of_time_with_work_waiting": watch.waiting_offered / max(1, watch.offered),
        "tokens": tokens,
    }


def rl_loop(service: weft.ServiceClient, tenant: int, until: float) -> int:
    """Sample eight groups of four, train, step, again; the tokens sampled before `until`."""
    training = service.create_lora_training_client(base_model=BASE_MODEL, rank=8, seed=tenant).result()
    sampler = training.save_weights_and_get_sampling_client().result()
    tokens = step = 0
    while time.monotonic() < until:
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
    return tokens


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


def loops(services: Sequence[weft.ServiceClient], seconds: float) -> float:
    """Output tokens per second of all loops together."""
    begun = time.monotonic()
    tokens = together([lambda s=s, n=n: rl_loop(s, n, begun + seconds) for n, s in enumerate(services)])
    return tokens / (time.monotonic() - begun)


def in_flight(service: weft.ServiceClient) -> dict[str, float]:
    sampler = service.create_sampling_client(base_model=BASE_MODEL).result()
    begun = time.monotonic()
    params = types.SamplingParams(max_tokens=4, stop=[])
    futures = [sampler.sample(prompt(i), 1, params) for i in range(SAMPLES_IN_FLIGHT)]
    ended = sum(len(future.result(timeout=150).sequences[0].tokens) == 4 for future in futures)
    return {"sent": SAMPLES_IN_FLIGHT, "ended": ended, "seconds": time.monotonic() - begun}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--quick", action="store_true", help="a few seconds of each")
    args = parser.parse_args()
    seconds = 5.0 if args.quick else 20.0
    with serve() as (url, data_dir):
        keys = [make_key(data_dir, f"tenant-{i}") for i in range(8)]
        services = [weft.ServiceClient(base_url=url, api_key=key) for key in keys]
        occupancy(url, keys[0], services[:1], 1.0)  # warm
        alone, shared = (occupancy(url, keys[0], some, seconds) for some in (services[:1], services))
        one, eight = loops(services[:1], seconds), loops(services, seconds)
        flight = in_flight(services[0])
    result = {
        "bench": "backfill",
        "compares": "Weft's own clients against one weftd, client and server on the same cores",
        "machine": machine(),
        "slots": SLOTS,
        "one_tenant_alone": alone,
        "eight_tenants": shared,
        "rl_output_tokens_per_s": {"1 client": one, "8 clients": eight, "ratio": eight / one},
        "in_flight": flight,
        "claims": [
            claim(
                "occupancy of slots, 8 tenants, while work waits",
                shared["while_work_waits"],
                0.95,
                shared["while_work_waits"] >= 0.95,
            ),
            claim("samples in flight without error", flight["ended"], 2000, flight["ended"] == SAMPLES_IN_FLIGHT),
        ],
    }
    print(json.dumps(result) if args.json else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
