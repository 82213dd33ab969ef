"""A small tenant beside one that means harm: what each attack costs it, and the server.

    python -m bench.neighbour [--json] [--quick] [--only NAME]...

Starts one real `weftd` with the built-in model. A small tenant, an unmodified `tinker` client in this process, samples
8 tokens and sends a forward_backward of 16, again and again: alone, and then beside each attack of
bench/parts/attacks.py, which another process does ten times at once for as long as the small tenant measures. A third
one asks for /healthz.

- p95 of both operations beside the attack, over their p95 alone. The claim: at most three times as long, or one pass of
  4,096 tokens longer, whichever is more.
- The longest that /healthz took: below 0.5 s.
- What the server's memory grew by, at its peak: below 300 MB.

All share the cores of one machine, so the figures include what the attackers themselves compute.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import tinker
from tinker import types

from bench.parts.attacks import ATTACKS, WORK, Target, new_run
from bench.parts.data import batch
from bench.parts.probe import forget_peak, peak, slowest_healthz
from bench.parts.results import asked, at_most, claim, machine, percentile, tell
from bench.parts.serving import BASE_MODEL, make_key, serve
from bench.path import timed

EVERY = ATTACKS | WORK
AT_ONCE = 10
PASS_TOKENS = 4096
MOST_TIMES, MOST_HEALTHZ_S, MOST_GROWTH_MB = 3.0, 0.5, 300.0


class Small:
    """The small tenant and its work."""

    def __init__(self, url: str, key: str) -> None:
        client = tinker.ServiceClient(base_url=url, api_key=key)
        self._run: Any = client.create_lora_training_client(BASE_MODEL, rank=8).result()
        self._sampler: Any = self._run.save_weights_and_get_sampling_client().result()

    def forward_backward(self) -> None:
        self._run.forward_backward(batch(1, 16), "cross_entropy").result()

    def sample(self) -> None:
        prompt = types.ModelInput.from_ints(list(range(20, 36)))
        self._sampler.sample(prompt, 1, types.SamplingParams(max_tokens=8, seed=1)).result()

    def one_pass(self) -> None:
        self._run.forward_backward(batch(32, PASS_TOKENS // 32), "cross_entropy").result()

    def p95_s(self, times: int) -> dict[str, float]:
        return {
            "forward_backward": percentile(timed(self.forward_backward, times), 0.95),
            "sample": percentile(timed(self.sample, times), 0.95),
        }


def attack(name: str, target: Target, begun: Any, ended: Any) -> None:
    """Run the attack ten times at once until `ended`, in a process of its own."""

    def again(_: int) -> None:
        while not ended.is_set():
            with suppress(httpx.HTTPError, OSError):
                EVERY[name](target)
            begun.set()

    os.nice(5)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(again, range(AT_ONCE)))


@contextmanager
def attacked(name: str, target: Target) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    begun, ended = context.Event(), context.Event()
    attacker = context.Process(target=attack, args=(name, target, begun, ended))
    attacker.start()
    try:
        begun.wait(20)  # most often it has done it once
        yield
    finally:
        ended.set()
        attacker.join(30)
        if attacker.is_alive():
            attacker.kill()


def beside(name: str, small: Small, target: Target, pid: int, times: int) -> dict[str, Any]:
    before = forget_peak(pid)
    with slowest_healthz(target.url) as worst, attacked(name, target):
        p95_s = small.p95_s(times)
    found = {"p95_s": p95_s, "healthz_s": worst[0], "growth_mb": (peak(pid) - before) / 1e6}
    print(f"{name}: {found}", file=sys.stderr, flush=True)
    return found


def claims_of(name: str, found: dict[str, Any], alone_s: dict[str, float], pass_s: float) -> list[dict[str, Any]]:
    claims = []
    for operation, alone in alone_s.items():
        times = found["p95_s"][operation] / alone
        most = max(MOST_TIMES, 1 + pass_s / alone)
        claims.append(at_most(f"{name}: p95 of {operation} over alone", times, most))
    healthz, growth = found["healthz_s"], found["growth_mb"]
    claims.append(claim(f"{name}: longest /healthz, s", healthz, MOST_HEALTHZ_S, healthz < MOST_HEALTHZ_S))
    claims.append(claim(f"{name}: memory of the server, MB more", growth, MOST_GROWTH_MB, growth < MOST_GROWTH_MB))
    return claims


def main() -> None:
    parser = asked(__doc__, quick="fewer repetitions")
    parser.add_argument("--only", action="append", choices=list(EVERY), help="this attack (may be given again)")
    args = parser.parse_args()
    times = 20 if args.quick else 100
    with serve() as (url, data_dir):
        pid = int((Path(data_dir) / "server.lock").read_text().split()[0])
        small, bad = Small(url, make_key(data_dir, "small")), make_key(data_dir, "harmful")
        target = Target(url, bad, new_run(url, bad, BASE_MODEL))
        small.p95_s(5)
        pass_s = min(timed(small.one_pass, 3))
        alone_s = small.p95_s(times)
        found = {name: beside(name, small, target, pid, times) for name in args.only or EVERY}
    result = {
        "bench": "neighbour",
        "compares": "a small tenant beside an attack, ten at once, with the same tenant alone; all on the same cores",
        "machine": machine(),
        "pass_s": pass_s,
        "alone_p95_s": alone_s,
        "attacks": found,
        "claims": [one for name, beside_it in found.items() for one in claims_of(name, beside_it, alone_s, pass_s)],
    }
    tell(result, args)


if __name__ == "__main__":
    main()
