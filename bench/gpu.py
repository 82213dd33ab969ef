"""What training many tenants at once, or decoding for them, costs on a GPU: speed, utilisation, memory, and where the
time goes.

    python bench/gpu.py --decode [--rows 1 8 64] [--length 1024] [--ranks 8 32]    see parts/gpu_decode.py
    python bench/gpu.py [--shape qwen3-30b-a3b] [--tenants 1 8 64] [--ranks 8 32] [--tokens 8192] [--json] [--out FILE]

A random-weight model of a published shape, in bfloat16; adapters on everything Tinker trains, in float32. A step is
forward, log-probabilities and backward of one packed pass of `--tokens` tokens, shared evenly by N tenants; no
optimizer, no service. For every rank the variants are interleaved, and the median of the rounds counts:

- tenants N: N groups with an adapter each; base: the frozen model with gradients of its inputs alone, the limit.

Where N adapters with their gradients do not fit beside the model, tenants share the arenas in turn; `distinct` says how
many there were. Utilisation counts the products that the mathematics needs (no recomputation, no padding) against
`--peak-tflops`. Exits with code 2 where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from bench.parts.gpu_measure import distinct_adapters, seconds_of, top_kernels
from bench.parts.passes import cut
from bench.parts.results import machine
from bench.parts.toy import CONFIG, random_decoder
from workers.model.adapters.adapter import Adapter
from workers.model.adapters.shape import AdapterShape
from workers.model.attend import PackedAttend
from workers.model.config import DecoderConfig, RopeConfig
from workers.model.decoder import Decoder
from workers.model.logprobs import target_logprobs
from workers.model.lora.rows import LoraRows
from workers.model.memory import choose_saving

SHAPES = {
    "qwen3-30b-a3b": DecoderConfig(
        architecture="Qwen3MoeForCausalLM",
        vocab_size=151_936,
        hidden_size=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=6144,
        context_length=40_960,
        rope=RopeConfig(theta=1e6),
        num_experts=128,
        experts_per_token=8,
        moe_intermediate_size=768,
        norm_topk=True,
    ),
    "tiny": replace(
        CONFIG,
        vocab_size=64,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=64,
        context_length=256,
        num_experts=4,
        experts_per_token=2,
        moe_intermediate_size=16,
    ),
}
#: Peak FLOP/s in bfloat16, without sparsity: H100 SXM and H200.
PEAK_TFLOPS = 989.0
SEED = 0


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one step per token: 2 for each multiplication and addition of a product."""

    base: float
    adapters: float

    @classmethod
    def per_token(cls, config: DecoderConfig, rank: int, sequence: int) -> Flops:
        """FLOPs of a token. The base is multiplied in the forward and, for the gradient of its inputs, in the backward;
        an adapter once more, for its own gradient. Causal attention covers half of the sequence on average and has two
        products in the forward and four in the backward."""
        c, d = config, config.hidden_size
        k, f, width = c.experts_per_token, c.moe_intermediate_size, c.intermediate_size
        attn = d * (c.q_size + 2 * c.kv_size) + c.q_size * d
        experts, dense = c.num_experts * d + k * 3 * d * f, 3 * d * width
        mlps = sum(experts if c.is_moe(layer) else dense for layer in range(c.num_layers))
        attention = 6 * c.num_layers * c.q_size * sequence
        base = 4 * (c.num_layers * attn + mlps + c.vocab_size * d) + attention
        low = c.num_layers * (3 * d + 2 * c.q_size + 2 * c.kv_size + d) + d + c.vocab_size
        # In experts, hidden-side factors are applied once per token, the others once per choice.
        low += sum(3 * d + (3 * k * f if c.is_moe(layer) else 3 * width) for layer in range(c.num_layers))
        return cls(base, 6 * rank * low)


def lengths_of(tokens: int, tenants: int, sequence: int) -> list[list[int]]:
    """The sequences of each tenant: an even share of the tokens, in sequences of at most `sequence`."""
    shares = [tokens * (i + 1) // tenants - tokens * i // tenants for i in range(tenants)]
    return [cut(share, sequence) for share in shares]


@dataclass(frozen=True)
class Pass:
    """One packed pass: the tokens of each tenant, and the adapters."""

    decoder: Decoder
    lengths: list[list[int]]
    rows: LoraRows

    @classmethod
    def of(
        cls, decoder: Decoder, lengths: list[list[int]], adapters: Sequence[Adapter], grads: Sequence[Adapter]
    ) -> Pass:
        tenants = range(len(lengths))
        offsets = [0, *accumulate(sum(own) for own in lengths)]
        rows = LoraRows(
            offsets, [adapters[i % len(adapters)] for i in tenants], [grads[i % len(grads)] for i in tenants]
        )
        return cls(decoder, lengths, rows)

    def step(self) -> None:
        """Forward, the sum of the tokens' log-probabilities, backward."""
        device, lengths = self.decoder.device, [length for own in self.lengths for length in own]
        generator = torch.Generator().manual_seed(SEED)
        tokens_T = torch.randint(0, self.decoder.config.vocab_size, (sum(lengths),), generator=generator).to(device)
        positions_T = torch.cat([torch.arange(n) for n in lengths]).to(device)
        hidden_TD = self.decoder(tokens_T, positions_T, PackedAttend(lengths), self.rows)
        every = torch.arange(len(tokens_T))
        target_logprobs(self.decoder, hidden_TD, every, tokens_T.roll(-1), self.rows).sum().backward()


def base_step(decoder: Decoder, lengths: list[list[int]]) -> Callable[[], None]:
    """Step of the frozen model: the embedding gets a gradient, or there would be no backward. An adapter without rows
    makes the decoder save memory as it does in training, and costs nothing."""
    shape = AdapterShape(decoder.config, 1, train_attn=False, train_mlp=False)
    adapter, grad = (Adapter.zeros(shape, device=decoder.device) for _ in range(2))
    every = [length for own in lengths for length in own]
    of = Pass(decoder, [every], LoraRows([0, 0, sum(every)], [adapter, None], [grad, None]))

    def run() -> None:
        decoder.embed.requires_grad_(True)
        try:
            of.step()
        finally:
            decoder.embed.requires_grad_(False)
            decoder.embed.grad = None

    return run


def report(seconds: float, tokens: int, flops: float, peak_tflops: float) -> dict[str, float]:
    return {
        "seconds": round(seconds, 5),
        "tokens_per_s": round(tokens / seconds, 1),
        "model_flop_utilisation": round(tokens * flops / seconds / (peak_tflops * 1e12), 4),
    }


def run_rank(decoder: Decoder, rank: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all variants at one rank."""
    config, device = decoder.config, decoder.device
    shape = AdapterShape(config, rank)
    free = torch.cuda.mem_get_info(device)[0]
    distinct = distinct_adapters(max(args.tenants), 4 * shape.numel, free)
    adapters = [Adapter.init(shape, seed, scale=2.0, device=device) for seed in range(distinct)]
    for adapter in adapters:
        adapter.flat.normal_(0.0, 0.02)  # B too: zeros are multiplied as fast, but say nothing of overflow
    grads = [Adapter.zeros(shape, device=device) for _ in adapters]
    passes = {n: Pass.of(decoder, lengths_of(args.tokens, n, args.sequence), adapters, grads) for n in args.tenants}
    base = base_step(decoder, lengths_of(args.tokens, 1, args.sequence))
    works: dict[str, Callable[[], None]] = {"base": base} | {f"tenants {n}": of.step for n, of in passes.items()}
    seconds = seconds_of(works, args.rounds, torch.cuda.synchronize)
    flops = Flops.per_token(config, rank, args.sequence)
    found = []
    for name, work in works.items():
        torch.cuda.reset_peak_memory_stats(device)
        kernels = top_kernels(work)
        counted = flops.base if name == "base" else flops.base + flops.adapters
        row = {"variant": name, "rank": rank, **report(seconds[name], args.tokens, counted, args.peak_tflops)}
        row |= {"limit": round(seconds["base"] / seconds[name], 4), "distinct": min(distinct, _count(name))}
        row |= {"peak_bytes": torch.cuda.max_memory_allocated(device), "kernels": kernels}
        found.append(row)
        print({key: value for key, value in row.items() if key != "kernels"}, flush=True)
    return found


def training(decoder: Decoder, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "tokens": args.tokens,
        "sequence": args.sequence,
        "peak_tflops": args.peak_tflops,
        "saving": choose_saving(decoder.config, args.tokens, (decoder.device, decoder.dtype)).value,
        "results": [row for rank in args.ranks for row in run_rank(decoder, rank, args)],
    }


def decoding(decoder: Decoder, args: argparse.Namespace) -> dict[str, Any]:
    from bench.parts import gpu_decode  # Triton: only a GPU needs it

    results = [
        row
        for rank in args.ranks
        for row in gpu_decode.run_rank(decoder, rank, args.rows, args.length, steps=args.steps, rounds=args.rounds)
    ]
    return {"length": args.length, "steps": args.steps, "results": results}


def _count(name: str) -> int:
    return int(name.rpartition(" ")[2]) if name != "base" else 0


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    if not torch.cuda.is_available():
        print(f"bench/gpu.py needs a CUDA device; torch {torch.__version__} finds none", file=sys.stderr)
        return 2
    config = SHAPES[args.shape]
    if args.layers:
        config = replace(config, num_layers=args.layers)
    device = torch.device("cuda", 0)
    decoder = random_decoder(config, device, torch.bfloat16)
    result = {
        "bench": "gpu decode" if args.decode else "gpu",
        "claims": [],  # no target is set for a GPU yet: the figures are the result
        "machine": machine() | {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda},
        "shape": args.shape,
        "layers": config.num_layers,
        **(decoding(decoder, args) if args.decode else training(decoder, args)),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result) if args.json else f"wrote {args.out}")
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Training, or decoding for, many tenants at once on a GPU.")
    parser.add_argument("--decode", action="store_true", help="decode steps instead of training")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64], help="sequences of a decode step")
    parser.add_argument("--length", type=int, default=1024, help="positions of each of them")
    parser.add_argument("--steps", type=int, default=20, help="decode steps of a round")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers than the shape has; 0: all")
    parser.add_argument("--tenants", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--tokens", type=int, default=8192, help="of one pass")
    parser.add_argument("--sequence", type=int, default=512, help="longest sequence")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak-tflops", type=float, default=PEAK_TFLOPS)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--out", type=Path, help="where to write; by default bench/results/gpu[_decode].json")
    args = parser.parse_args(argv)
    name = "gpu_decode.json" if args.decode else "gpu.json"
    args.out = args.out or Path(__file__).parent / "results" / name
    return args


if __name__ == "__main__":
    sys.exit(main())
