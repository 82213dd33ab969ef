"""What sharing one training pass costs: ratios on a small mixture of experts with random weights, on the CPU.

    python bench/trainer.py [--json] [--out FILE] [--threads 1] [--rounds 5] [--cases 64x16 ...]
    python bench/trainer.py --curves [--json] [--out FILE] [--plot docs/performance.png]

One interleaved run per case: every variant in turn, round after round, CPU time of the process, the minimum of the
rounds. So a neighbour on the machine or a drift of its clock hits all variants alike. A step is forward, loss and
backward; no optimizer, no service. Token embeddings have unit size, so that tokens choose different experts as they do
in a trained model (with embeddings of 0.02 all tokens of a random model crowd on the same few).

- batched: N tenants with an adapter each, in one pass;
- one: the same tokens as one group with one adapter;
- base: frozen, gradients of the inputs alone: what no adapter can beat;
- sequential: the N tenants one after another, through the same code; peft: the same through transformers and peft
  (bench/parts/peers.py), which trains one adapter at a time. Of these at most four tenants are timed and the time is
  scaled: neither gets slower with N;
- batched_attention, peft_attention: the same with adapters on attention alone, equal on both sides;
- apart: every group's products alone, the fallback where rows depend on their neighbours.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.parts.passes import cut
from bench.parts.peers import adapter_parameters, peft_model, shape_of
from bench.parts.results import asked, at_least, machine, tell
from bench.parts.serving import as_workers_run
from bench.parts.toy import CONFIG, random_decoder
from workers.model.adapters.adapter import Adapter
from workers.model.adapters.shape import AdapterShape
from workers.model.attend import PackedAttend
from workers.model.decoder import Decoder
from workers.model.logprobs import target_logprobs
from workers.model.lora.rows import LoraRows

#: Batches of more tokens are computed in pieces, as the trainer does: larger ones fall out of the caches.
PASS_TOKENS = 4096
#: The longest sequence in tokens; a tenant's tokens are cut into such sequences.
SEQUENCE = 128
TIMED_ALONE = 4

#: (tenants, tokens each), and the variants measured besides batched, one and base.
CASES: dict[tuple[int, int], tuple[str, ...]] = {
    (64, 16): ("sequential", "peft", "batched_attention", "peft_attention", "apart"),
    (64, 64): ("sequential",),
    (64, 256): ("peft", "batched_attention", "peft_attention"),
    (16, 256): (),
    (16, 16): (),
}
#: (name, case, numerator, denominator, target): a ratio of times, higher is better for us.
TARGETS = (
    ("N=64 x 64 tokens: one adapter / batched", (64, 64), "one", "batched", 0.97),
    ("N=64 x 256 tokens: one adapter / batched", (64, 256), "one", "batched", 0.95),
    ("N=64 x 16 tokens: one adapter / batched", (64, 16), "one", "batched", 0.92),
    ("N=16 x 256 tokens: frozen base / batched", (16, 256), "base", "batched", 0.85),
    ("N=64 x 16 tokens: peft in turn / batched", (64, 16), "peft", "batched", 8.0),
    ("N=64 x 256 tokens: peft in turn / batched", (64, 256), "peft", "batched", 1.5),
    ("N=64 x 16 tokens, attention alone: peft in turn / batched", (64, 16), "peft_attention", "batched_attention", 4.0),
    (
        "N=64 x 256 tokens, attention alone: peft in turn / batched",
        (64, 256),
        "peft_attention",
        "batched_attention",
        1.2,
    ),
    ("N=64 x 16 tokens: ourselves in turn / batched", (64, 16), "sequential", "batched", 3.0),
)


@dataclass(frozen=True)
class Batch:
    """`tenants` times `tokens_each` packed tokens."""

    tenants: int
    tokens_each: int

    @property
    def passes(self) -> list[range]:
        """The tenants of each piece."""
        together = max(1, PASS_TOKENS // self.tokens_each)
        return [range(at, min(at + together, self.tenants)) for at in range(0, self.tenants, together)]

    @property
    def lengths(self) -> list[int]:
        return cut(self.tokens_each, SEQUENCE) * self.tenants

    @property
    def tokens_T(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.tokens_each)
        return torch.randint(0, CONFIG.vocab_size, (self.tenants * self.tokens_each,), generator=generator)


def step(decoder: Decoder, batch: Batch, rows: LoraRows | None) -> None:
    """Forward, the sum of the tokens' log-probabilities, backward."""
    lengths, tokens_T = batch.lengths, batch.tokens_T
    positions_T = torch.cat([torch.arange(n) for n in lengths])
    hidden_TD = decoder(tokens_T, positions_T, PackedAttend(lengths), rows)
    logprobs = target_logprobs(decoder, hidden_TD, torch.arange(len(tokens_T)), tokens_T.roll(-1), rows)
    logprobs.sum().backward()


def frozen_step(decoder: Decoder, batch: Batch) -> None:
    """The same without adapters; the embedding gets a gradient, or there would be no backward."""
    decoder.embed.requires_grad_(True)
    try:
        step(decoder, batch, None)
    finally:
        decoder.embed.requires_grad_(False)
        decoder.embed.grad = None


@dataclass(frozen=True)
class Tenants:
    """The adapters of the tenants, all of one shape, with their gradients."""

    adapters: list[Adapter]
    grads: list[Adapter]

    @classmethod
    def of(cls, shape: AdapterShape, count: int) -> Tenants:
        adapters = [Adapter.init(shape, seed, scale=4.0) for seed in range(count)]
        return cls(adapters, [Adapter.zeros(shape) for _ in adapters])

    def rows(self, tenants: range, tokens_each: int) -> LoraRows:
        offsets = [i * tokens_each for i in range(len(tenants) + 1)]
        return LoraRows(offsets, [self.adapters[i] for i in tenants], [self.grads[i] for i in tenants])


def variants(decoder: Decoder, batch: Batch, rank: int, names: tuple[str, ...]) -> dict[str, Callable[[], None]]:
    tenants = Tenants.of(shape_of(CONFIG, rank, "experts"), batch.tenants)
    few = min(TIMED_ALONE, batch.tenants)
    single = Batch(1, batch.tokens_each)

    def batched(tenants: Tenants = tenants) -> None:
        for of in batch.passes:
            step(decoder, Batch(len(of), batch.tokens_each), tenants.rows(of, batch.tokens_each))

    def one() -> None:
        for of in batch.passes:
            rows = LoraRows([0, len(of) * batch.tokens_each], tenants.adapters[:1], tenants.grads[:1])
            step(decoder, Batch(len(of), batch.tokens_each), rows)

    def base() -> None:
        for of in batch.passes:
            frozen_step(decoder, Batch(len(of), batch.tokens_each))

    def apart() -> None:
        decoder.isolation = "per-segment"
        batched()
        decoder.isolation = "padded"

    def sequential() -> None:
        for number in range(few):
            step(decoder, single, tenants.rows(range(number, number + 1), single.tokens_each))

    every: dict[str, Callable[[], None]] = {
        "batched": batched,
        "one": one,
        "base": base,
        "sequential": sequential,
        "apart": apart,
    }
    if "peft" in names:
        every["peft"] = peft_step(peer(tenants.adapters[:few]), single, few)
    if "peft_attention" in names:
        narrow = Tenants.of(shape_of(CONFIG, rank, "attention"), batch.tenants)
        every["batched_attention"] = partial(batched, narrow)
        every["peft_attention"] = peft_step(peer(narrow.adapters[:few]), single, few)
    return {name: every[name] for name in ("batched", "one", "base", *names)}


def peer(adapters: Sequence[Adapter]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return peft_model(CONFIG, adapters, Path(folder), trainable=True)


def peft_step(model: Any, batch: Batch, adapters: int) -> Callable[[], None]:
    """The tenants' steps one after another, with transformers and peft."""
    tokens_BL = batch.tokens_T.view(-1, min(SEQUENCE, batch.tokens_each))

    def run() -> None:
        for number in range(adapters):
            model.set_adapter(f"a{number}")
            logits = model(input_ids=tokens_BL, use_cache=False).logits
            targets = tokens_BL.flatten().roll(-1)
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum").backward()

    return run


def measure(works: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Least CPU seconds of each function, after one round that is not counted."""
    best = dict.fromkeys(works, float("inf"))
    for count in range(rounds + 1):
        for name, work in works.items():
            gc.collect()
            began = time.process_time()
            work()
            if count:
                best[name] = min(best[name], time.process_time() - began)
    return best


def run_case(decoder: Decoder, batch: Batch, rank: int, names: tuple[str, ...], rounds: int) -> dict[str, float]:
    """CPU milliseconds of each variant for all tenants."""
    seconds = measure(variants(decoder, batch, rank, names), rounds)
    few = min(TIMED_ALONE, batch.tenants)
    scaled = dict.fromkeys(("sequential", "peft", "peft_attention"), batch.tenants / few)
    return {name: round(1e3 * took * scaled.get(name, 1.0), 1) for name, took in seconds.items()}


def table(threads: int, rounds: int, chosen: list[str]) -> dict[str, Any]:
    torch.set_num_threads(threads)
    decoder = random_decoder()
    cases = {}
    for (tenants, tokens), names in CASES.items():
        if chosen and f"{tenants}x{tokens}" not in chosen:
            continue
        cases[(tenants, tokens)] = run_case(decoder, Batch(tenants, tokens), 8, names, rounds)
        print(f"threads {threads}, {tenants} x {tokens}: {cases[(tenants, tokens)]}", file=sys.stderr, flush=True)
    claims = []
    for name, case, above, below, target in TARGETS:
        if case in cases:
            value = cases[case][above] / cases[case][below]
            claims.append(at_least(name, value, target))
            print(f"  {name}: {value:.2f} (target {target})", file=sys.stderr, flush=True)
    times = {f"{tenants}x{tokens}": case for (tenants, tokens), case in cases.items()}
    return {"threads": threads, "cpu_ms": times, "adapter_parameters": adapter_parameters(CONFIG, 8), "claims": claims}


def curves(rounds: int) -> dict[str, Any]:
    """How the cost per token grows with tenants, with tokens per tenant and with the rank; 1 thread."""
    torch.set_num_threads(1)
    decoder = random_decoder()
    axes: dict[str, list[tuple[Batch, int, int]]] = {
        "tenants (16 tokens each, rank 8)": [(Batch(n, 16), 8, n) for n in (1, 4, 16, 64, 256)],
        "tokens per tenant (16 tenants, rank 8)": [(Batch(16, t), 8, t) for t in (16, 64, 256, 1024)],
        "rank (16 tenants, 64 tokens each)": [(Batch(16, 64), r, r) for r in (4, 8, 16, 32, 64)],
    }
    found: dict[str, Any] = {}
    for axis, points in axes.items():
        found[axis] = []
        for batch, rank, at in points:
            took = run_case(decoder, batch, rank, (), rounds)
            tokens = batch.tenants * batch.tokens_each
            found[axis].append({"at": at, **{name: round(1e3 * ms / tokens, 2) for name, ms in took.items()}})
            print(axis, found[axis][-1], file=sys.stderr, flush=True)
    return found


def plot(found: dict[str, Any], file: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(found), figsize=(11, 3.2), sharey=True)
    for ax, (title, points) in zip(axes, found.items(), strict=True):
        for name, style in (("batched", "o-"), ("one", "s--"), ("base", ":")):
            ax.plot([p["at"] for p in points], [p[name] for p in points], style, label=name)
        ax.set(xscale="log", yscale="log", xlabel=title, xticks=[p["at"] for p in points])
        ax.set_xticklabels([str(p["at"]) for p in points])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("CPU µs per token")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=80)


def main() -> None:
    parser = asked(__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", default=[], help="of the table only these, as 64x16")
    parser.add_argument("--curves", action="store_true", help="growth curves instead of the table")
    parser.add_argument("--plot", type=Path, help="with --curves: draw them here")
    args = parser.parse_args()
    result: dict[str, Any] = {
        "bench": "trainer",
        "compares": "variants of one pass, in this process",
        "machine": machine(),
    }
    if args.curves:
        result["cpu_us_per_token"] = curves(args.rounds)
        if args.plot:
            plot(result["cpu_us_per_token"], args.plot)
    else:
        result["runs"] = [table(threads, args.rounds, args.cases) for threads in args.threads]
        result["claims"] = [
            {**claim, "name": f"{claim['name']} ({run['threads']} thread{'s' * (run['threads'] > 1)})"}
            for run in result["runs"]
            for claim in run.pop("claims")
        ]
    tell(result, args)


if __name__ == "__main__":
    as_workers_run()
    main()
