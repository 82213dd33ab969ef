"""What one token through a recurrence costs at published widths: recur.c against torch, on the CPU, 1 thread.

    python bench/recurrences.py [--json] [--out FILE] [--rounds 10]

Per model, a decode step of TorchEngine with 64 sequences, without adapters, of a few of its layers with random weights;
both ways in turn, round after round, CPU time of the process, the minimum of the rounds:

- Qwen3.5-0.8B: four layers, which is its pattern once: three with a gated delta rule, one with attention; MLPs;
- Nemotron-3-Nano-30B-A3B: two layers of Mamba-2 and one of attention, with one MLP in place of its experts.

The vocabulary is small, so what is shared out over few layers does not hide them. The torch side is what a machine
without a C compiler runs.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

from bench.generator import BATCH, advance, running
from bench.parts.results import asked, at_least, machine, tell
from bench.parts.serving import as_workers_run
from bench.parts.toy import random_decoder
from workers.generator.torch_engine import TorchEngine
from workers.model.config import DecoderConfig, DeltaConfig, GateConfig, MambaConfig, RopeConfig
from workers.model.parts import one_token

#: The target: a step's time with torch over its time with the kernel.
GOAL = 2.0
STEPS = 2
MODELS = {
    "Qwen3.5-0.8B": DecoderConfig(
        "Qwen3_5ForCausalLM",
        vocab_size=1024,
        hidden_size=1024,
        num_layers=4,
        num_heads=8,
        num_kv_heads=2,
        head_dim=256,
        intermediate_size=3584,
        context_length=512,
        rope=RopeConfig(partial=0.25),
        output_gate=True,
        delta=DeltaConfig((0, 1, 2), 16, 16, 128, 128, 4, grouped=False),
    ),
    "Nemotron-3-Nano": DecoderConfig(
        "NemotronHForCausalLM",
        vocab_size=1024,
        hidden_size=2688,
        num_layers=4,
        num_heads=32,
        num_kv_heads=2,
        head_dim=128,
        intermediate_size=3712,
        context_length=512,
        rope=RopeConfig(partial=0.0),
        qk_norm="",
        gate=GateConfig(gated=False),
        mamba=MambaConfig((0, 1), 64, 64, 8, 128, 4),
        mlp_layers=(3,),
    ),
}


def measured(config: DecoderConfig, rounds: int) -> dict[str, float]:
    """CPU milliseconds of a step with the kernel, and of one with torch's recurrences."""
    engine = running(random_decoder(config), [None] * BATCH)
    best = {"c": float("inf"), "torch": float("inf")}
    for _ in range(rounds):
        best["c"] = min(best["c"], _step_ms(engine))
        with mock.patch.object(one_token, "_in_c", lambda native, *given: one_token.in_torch(*given)):
            best["torch"] = min(best["torch"], _step_ms(engine))
    return {name: round(took, 1) for name, took in best.items()}


def _step_ms(engine: TorchEngine) -> float:
    advance(engine)  # what it allocates for the first time, and torch's states
    gc.collect()
    began = time.process_time()
    for _ in range(STEPS):
        advance(engine)
    return 1e3 * (time.process_time() - began) / STEPS


def main(arguments: Sequence[str] | None = None) -> None:
    parser = asked(__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "bench": "recurrences",
        "compares": "a decode step with recur.c and with torch, in this process",
        "machine": machine(),
        "claims": [],
        "step_cpu_ms": {},
    }
    for name, config in MODELS.items():
        result["step_cpu_ms"][name] = found = measured(config, args.rounds)
        value = found["torch"] / found["c"]
        what = f"{name}'s layers, a step of {BATCH}: recurrences in torch / in C"
        result["claims"].append(at_least(what, value, GOAL))
    tell(result, args)


if __name__ == "__main__":
    as_workers_run()
    main()
