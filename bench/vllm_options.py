"""What options of vLLM do to its log-probabilities: each sampled token is scored by Weft's own engine with the same
weights, beside what vLLM said of it. On a machine without GPUs: `make vllm`, then

    python bench/vllm_options.py [--only WORD] [--json]

Guessing is measured without the request with top-k that a vLLM is usually warmed up with: vLLM 0.32 dies of one on a
CPU in which nothing was guessed.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.parts.results import asked, claim, machine, tell
from workers.generator.engine import Finished, GenerateRequest, SamplingParams
from workers.generator.torch_engine import TorchEngine
from workers.generator.vllm.adapters import LoraLimits, targets
from workers.generator.vllm.engine import VllmEngine
from workers.generator.vllm.server import Launch, VllmFailed, VllmServer
from workers.model.adapters.adapter import Adapter, save_adapter
from workers.model.adapters.shape import AdapterShape
from workers.model.base.weights import load_decoder
from workers.model.families.read import read_config
from workers.model.tiny import TINY_PATH

ROOT = Path(__file__).resolve().parents[1]
CONFIG, CONTEXT, SLOTS = read_config("tiny", TINY_PATH), 256, 16
LIMITS = LoraLimits(max_adapters=2, max_rank=8)
#: Requests of each kind, and the tokens of each.
REQUESTS, TOKENS = 8, 48
CLAIM = "float32, FP8 apart: largest difference of a logprob, millionths"
CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "bfloat16": {"dtype": "bfloat16"},
    "guesses by n-grams": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    },
    "keys and values offloaded": {"kv_offloading_size": 1},
    "FP8 keys and values": {"kv_cache_dtype": "fp8"},
    "FP8 weights, bfloat16": {"dtype": "bfloat16", "quantization": "fp8_per_tensor"},
    "two processes by tensors": {"tensor_parallel_size": 2},
    "two processes by data": {"data_parallel_size": 2},
}


def main() -> None:
    parser = asked(__doc__)
    parser.add_argument("--only", default="", help="cases whose name has this word")
    chosen = parser.parse_args()
    found = {name: measured(options) for name, options in CASES.items() if chosen.only in name}
    exact = [found[name] for name in found if not name.startswith(("bfloat16", "FP8"))]
    off = max((row[kind]["largest"] for row in exact if row["runs"] for kind in ("base", "adapter")), default=0.0)
    result = {
        "bench": "vllm_options",
        "compares": "log-probabilities of the tokens that vLLM drew, by itself and by TorchEngine in float32",
        "machine": machine(),
        "cases": found,
        "claims": [claim(CLAIM, 1e6 * off, 100, off <= 1e-4)],
    }
    tell(result, chosen)


WARM_UP = VllmServer._warm_up


def measured(options: dict[str, Any]) -> dict[str, Any]:
    setattr(VllmServer, "_warm_up", _without_top_k if "speculative_config" in options else WARM_UP)  # noqa: B010
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dtype = options.pop("dtype", "float32")
        launch = Launch(
            ROOT / ".vllm" / "bin" / "vllm", TINY_PATH, targets(CONFIG), CONTEXT, SLOTS, LIMITS, dtype, options=options
        )
        engine = VllmEngine(
            CONFIG,
            (),
            slots=SLOTS,
            context=CONTEXT,
            limits=LIMITS,
            folder=folder / "adapters",
            launch=launch,
            lossy_adapters=True,
        )
        try:
            engine.wait_ready(400)
            return _agreement(engine, adapter(folder))
        except VllmFailed as error:
            return {"runs": False, "says": str(error)}
        finally:
            engine.close()


async def _without_top_k(server: VllmServer) -> None:
    params = {"max_tokens": 3, "logprobs": 0, "detokenize": False}
    body = {"model": server.base, "request_id": "warm-up", "token_ids": [1, 2, 3], "sampling_params": params}
    await server.client.generate(body)


def adapter(folder: Path) -> Path:
    made = Adapter.init(AdapterShape(CONFIG, 8, True, True, False), seed=1, scale=0.7)
    made.flat.add_(torch.randn(made.flat.shape, generator=torch.Generator().manual_seed(1)), alpha=0.03)
    save_adapter(made, folder / "a", base_model="tiny", details={"step": 1})
    return folder / "a"


def _agreement(engine: VllmEngine, weights: Path) -> dict[str, Any]:
    """The base model and an adapter, prompts that repeat themselves, half of them greedy."""
    reference = TorchEngine(load_decoder(TINY_PATH), (), slots=SLOTS, context=CONTEXT)
    rows: dict[str, Any] = {"runs": True}
    for kind, folder in (("base", None), ("adapter", weights)):
        requests = [
            GenerateRequest(
                f"{kind}{number}",
                tuple(int(t) for t in np.random.default_rng(number).integers(10, 1500, 12)) * 3,
                SamplingParams(max_tokens=TOKENS, seed=number, temperature=float(number % 2), stop_at_eos=False),
                adapter="a" if folder else "",
                adapter_folder=folder,
            )
            for number in range(REQUESTS)
        ]
        answers = finished(engine, requests)
        off = []
        for request in requests:
            answer = answers[request.id]
            if answer.error is not None:
                rows[kind] = str(answer.error)
                break
            tokens = answer.sequences[0].tokens
            whole = replace(
                request,
                prompt=(*request.prompt, *tokens.tolist()),
                sampling=SamplingParams(max_tokens=0),
                prompt_logprobs=True,
            )
            scored = finished(reference, [whole])[request.id].prompt_logprobs
            assert scored is not None
            said = answer.sequences[0].logprobs
            assert said is not None
            off.append(np.abs(said - scored[len(request.prompt) :]))
        else:
            all_of_them = np.concatenate(off)
            rows[kind] = {
                "tokens": len(all_of_them),
                "largest": float(all_of_them.max()),
                "mean": float(all_of_them.mean()),
            }
    return rows


def finished(engine: Any, requests: list[GenerateRequest]) -> dict[str, Finished]:
    for request in requests:
        engine.add(request)
    found: dict[str, Finished] = {}
    while len(found) < len(requests):
        found |= {end.id: end for end in engine.step()}
    return found


if __name__ == "__main__":
    main()
