"""What prompt lookup (`[generator] lookup`) brings in decoding, on the CPU: the same requests with and without.

    python bench/lookup.py [--json] [--out FILE] [--rounds 5] [--lookup 4]

One interleaved run, CPU time of the process, 1 thread, the minimum of the rounds, from the first decode step to the
last; tokens and logprobs are compared bit for bit on the way. 16 slots, of which 1, 4 or 12 are taken.

- sums: the built-in model goes on with a list of sums, which it was trained on, at temperatures 0 and 1.
- circle: bench/trainer.py's mixture of experts with random weights, which at temperature 0 goes round in circles.
- noise: the same at temperature 1, where nothing comes again: what looking costs.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from bench.parts.results import asked, at_least, machine, tell
from bench.parts.serving import as_workers_run
from bench.parts.toy import CONFIG, random_decoder
from workers.generator.engine import EngineStats, Finished, GenerateRequest, SamplingParams
from workers.generator.torch_engine import TorchEngine
from workers.model.base.weights import load_decoder
from workers.model.decoder import Decoder
from workers.model.tiny import TINY_PATH

SLOTS, TAKEN = 16, (1, 4, 12)
PROMPT, SAMPLED, CONTEXT = 64, 192, 512
#: (case, sequences, target: CPU time without lookup over CPU time with it).
TARGETS = (("sums, temperature 0", 1, 1.5), ("circle", 1, 1.5), ("noise", 1, 0.9), ("noise", 12, 0.9))


@dataclass(frozen=True)
class Case:
    decoder: Decoder
    prompts: list[tuple[int, ...]]
    temperature: float


@dataclass(frozen=True)
class Measured:
    seconds: float
    stats: EngineStats
    finished: dict[str, Finished]


def cases() -> dict[str, Case]:
    built_in, random = load_decoder(TINY_PATH), random_decoder()
    tokenizer = Tokenizer.from_file(str(TINY_PATH / "tokenizer.json"))
    lists = ["".join(f"{n + 3} + {m} = {n + m + 3}\n" for m in range(8)) for n in range(SLOTS)]
    sums = [tuple(tokenizer.encode(text).ids) for text in lists]
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, CONFIG.vocab_size, (SLOTS, PROMPT), generator=generator).tolist()
    of_random = [tuple(prompt) for prompt in noise]
    return {
        "sums, temperature 0": Case(built_in, sums, 0.0),
        "sums, temperature 1": Case(built_in, sums, 1.0),
        "circle": Case(random, of_random, 0.0),
        "noise": Case(random, of_random, 1.0),
    }


def measure(case: Case, sequences: int, lookup: int) -> Measured:
    engine = TorchEngine(case.decoder, (), slots=SLOTS, context=CONTEXT, prefix_bytes=0, lookup=lookup)
    sampling = SamplingParams(max_tokens=SAMPLED, temperature=case.temperature, stop_at_eos=False)
    for number, prompt in enumerate(case.prompts[:sequences]):
        engine.add(GenerateRequest(f"r{number}", prompt, replace(sampling, seed=number)))
    while engine.stats().waiting:
        engine.step()
    gc.collect()
    finished: dict[str, Finished] = {}
    began = time.process_time()
    while engine.busy:
        finished |= {one.id: one for one in engine.step()}
    return Measured(time.process_time() - began, engine.stats(), finished)


def compare(case: Case, sequences: int, lookup: int, rounds: int) -> dict[str, Any]:
    best = {0: float("inf"), lookup: float("inf")}
    for _ in range(rounds):
        found = {most: measure(case, sequences, most) for most in best}
        same(found[0], found[lookup])
        best = {most: min(best[most], found[most].seconds) for most in best}
    counts = found[lookup].stats
    return {
        "cpu_ms_per_token": {name: 1e3 * best[most] / sequences / SAMPLED for name, most in
                             (("without", 0), ("with", lookup))},
        "ratio": best[0] / best[lookup],
        "steps": {"without": found[0].stats.decode_steps, "with": counts.decode_steps},
        "drafted": counts.drafted_tokens,
        "accepted": counts.accepted_tokens,
    }  # fmt: skip


def same(one: Measured, other: Measured) -> None:
    for id, finished in one.finished.items():
        for a, b in zip(finished.sequences, other.finished[id].sequences, strict=True):
            assert a.logprobs is not None
            assert b.logprobs is not None
            if not (np.array_equal(a.tokens, b.tokens) and np.array_equal(a.logprobs, b.logprobs)):
                raise AssertionError(f"{id}: lookup has changed what was drawn")


def main() -> None:
    parser = asked(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lookup", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "bench": "lookup",
        "compares": "decoding with prompt lookup and without, in this process",
        "machine": machine(),
        "lookup": args.lookup,
        "cases": {},
    }
    for name, case in cases().items():
        of_case = {sequences: compare(case, sequences, args.lookup, args.rounds) for sequences in TAKEN}
        result["cases"][name] = of_case
        print(name, json.dumps(of_case), file=sys.stderr, flush=True)
    result["claims"] = [
        at_least(f"{name}, {n} at once: CPU time without / with", ratio, goal)
        for name, n, goal in TARGETS
        for ratio in [result["cases"][name][n]["ratio"]]
    ]
    tell(result, args)


if __name__ == "__main__":
    as_workers_run()
    main()
