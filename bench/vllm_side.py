"""vLLM beside TorchEngine on the model that comes with Weft: start, tokens per second, an adapter swap.

    python bench/vllm_side.py [--rounds 3] [--threads 1] [--program .vllm/bin/vllm] [--json FILE]

64 requests at once, 32 prompt and 128 sampled tokens, temperature 1, a seed each. base: without adapters; mixed: a
quarter without, the others over 8 adapters of rank 8 (attention and experts). Both engines have the same threads and
take turns; the most tokens per second of the rounds, by the clock, everything between the engine's `add` and its
results included. `start_s` is from nothing to the first answers of every kind, `swap_s` one in-place swap of an adapter
in use, the reading and writing of its files included.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from serving import machine

from workers.generator.engine import Engine, GenerateRequest, SamplingParams
from workers.generator.torch_engine import TorchEngine
from workers.generator.vllm.adapters import LoraLimits, targets
from workers.generator.vllm.engine import VllmEngine
from workers.generator.vllm.server import Launch
from workers.model.adapter import Adapter, AdapterShape, save_adapter
from workers.model.card import read_card
from workers.model.tiny import TINY_NAME, TINY_PATH
from workers.model.weights import load_decoder

CONCURRENT, ADAPTERS, RANK = 64, 8, 8
PROMPT, SAMPLED, CONTEXT = 32, 128, 256
CARD = read_card(TINY_NAME, TINY_PATH)


def write_adapters(folder: Path) -> list[Path]:
    shape = AdapterShape(CARD.config, RANK, train_unembed=False)
    folders = [folder / f"a{number}" for number in range(ADAPTERS)]
    for number, place in enumerate(folders):
        adapter = Adapter.init(shape, seed=number)
        adapter.flat.add_(torch.randn(adapter.flat.shape, generator=torch.Generator().manual_seed(number)), alpha=0.01)
        save_adapter(adapter, place, base_model=TINY_NAME)
    return folders


def requests(folders: list[Path]) -> list[GenerateRequest]:
    """64 of them; with folders, one in four goes without."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for number in range(CONCURRENT):
        prompt = tuple(torch.randint(10, 1500, (PROMPT,), generator=draw).tolist())
        folder = folders[number % ADAPTERS] if folders and number % 4 else None
        sampling = SamplingParams(max_tokens=SAMPLED, seed=number, stop_at_eos=False)
        name = folder.name if folder else ""
        made.append(GenerateRequest(f"r{number}", prompt, sampling, adapter=name, adapter_folder=folder))
    return made


def tokens_per_second(engine: Engine, work: list[GenerateRequest]) -> float:
    began, tokens = time.perf_counter(), 0
    for request in work:
        engine.add(request)
    while engine.busy:
        for finished in engine.step():
            assert finished.error is None, finished.error
            tokens += finished.facts.sample
    return tokens / (time.perf_counter() - began)


def swap_s(engine: VllmEngine, folders: list[Path]) -> float:
    sampling = SamplingParams(max_tokens=200, seed=0, stop_at_eos=False)
    engine.add(GenerateRequest("swapped", (1, 2, 3), sampling, adapter="policy", adapter_folder=folders[0]))
    for _ in range(20):
        engine.step()
    began = time.perf_counter()
    engine.swap_adapter("policy", folders[1])
    taken = time.perf_counter() - began
    while engine.busy:
        engine.step()
    return taken


def measure(program: Path, threads: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as temporary:
        folder, limits = Path(temporary), LoraLimits(ADAPTERS, RANK)
        folders = write_adapters(folder)
        launch = Launch(
            program.absolute(), TINY_PATH, targets(CARD.config), CONTEXT, CONCURRENT, limits, threads=threads
        )
        began = time.perf_counter()
        vllm = VllmEngine(
            CARD.config, (), slots=CONCURRENT, context=CONTEXT, limits=limits, folder=folder / "vllm", launch=launch
        )
        try:
            vllm.wait_ready()
            found: dict[str, Any] = {"start_s": round(time.perf_counter() - began, 1)}
            ours = TorchEngine(load_decoder(TINY_PATH), (), slots=CONCURRENT, context=CONTEXT)
            engines: dict[str, Engine] = {"torch": ours, "vllm": vllm}
            best = {f"{name}_{kind}": 0.0 for kind in ("base", "mixed") for name in engines}
            for _ in range(rounds + 1):  # the first one warms up, and fills the prefix caches of both
                for kind, used in (("base", []), ("mixed", folders)):
                    for name, engine in engines.items():
                        key = f"{name}_{kind}"
                        best[key] = max(best[key], tokens_per_second(engine, requests(used)))
            found["tokens_per_s"] = {key: round(value) for key, value in best.items()}
            found["torch_over_vllm"] = {k: round(best[f"torch_{k}"] / best[f"vllm_{k}"], 2) for k in ("base", "mixed")}
            found["swap_s"] = round(min(swap_s(vllm, folders) for _ in range(3)), 3)
        finally:
            vllm.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--program", type=Path, default=Path(__file__).parents[1] / ".vllm" / "bin" / "vllm")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = {"machine": machine(), "threads": args.threads, **measure(args.program, args.threads, args.rounds)}
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
