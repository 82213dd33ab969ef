"""Which tiles of the adapters' kernels are fastest on this GPU: for one kernel after the other, by its own time in a
pass of 64 tenants, or in a decode step of 64 rows, each with an adapter.

    python bench/gpu_tiles.py [--layers 4] [--rank 8]

For another GPU, or after a kernel has changed. Prints milliseconds of each, the fastest first; constants are changed by
hand, in the modules that it names. The shape is that of Qwen3-30B-A3B, of which a few layers are enough. Exits with
code 2 where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu import SHAPES, Pass, lengths_of
from bench.parts.toy import random_decoder
from workers.model.adapters.adapter import Adapter
from workers.model.adapters.shape import AdapterShape
from workers.model.decoder import Decoder

TENANTS, TOKENS, SEQUENCE, LENGTH = 64, 8192, 512, 1024


class Choice(NamedTuple):
    """A constant of a module, the kernel whose launches it shapes, and the values to try."""

    module: ModuleType
    constant: str
    kernel: str
    values: Sequence[Any]


def trained() -> list[Choice]:
    from workers.model.gpu import combine, gate, launch, softmax  # Triton: only a GPU needs it

    def tiles(*of: tuple[int, int]) -> list[Any]:
        return [launch.Tile(*each) for each in of]

    few = (64, 2), (128, 2), (128, 4), (256, 4), (256, 8)
    return [
        Choice(gate, "FORWARD_HELD", "swiglu", tiles((32, 1), (64, 1), (64, 2), (128, 2), (128, 4))),
        Choice(gate, "BACKWARD", "swiglu_backward", tiles(*few)),
        Choice(softmax, "FORWARD", "log_sum", tiles(*few)),
        Choice(softmax, "BACKWARD", "log_sum_backward", tiles(*few)),
        Choice(combine, "ADDED", "gather_sum_expand", tiles((64, 4), (128, 4), (128, 8), (256, 4), (256, 8))),
        Choice(launch, "OUTER_EXPERTS", "outer", tiles(*few, (256, 2))),
        Choice(launch, "OUTER", "outer", tiles((32, 4), (64, 4), (128, 4))),
        Choice(launch, "EXPAND", "expand", tiles(*few)),
        Choice(launch, "SHRINK", "shrink", tiles((64, 4), (128, 4), (256, 4), (128, 8))),
    ]


def decoded() -> list[Choice]:
    from workers.model.gpu import single

    def pieces(*of: tuple[int, int, int]) -> list[Any]:
        return [single.Piece(*each) for each in of]

    return [
        Choice(single, "SHRINK_WIDE", "shrink_row", pieces((1, 2048, 4), (2, 2048, 4), (4, 2048, 8), (4, 1024, 4))),
        Choice(single, "SHRINK", "shrink_row", pieces((8, 1024, 4), (4, 1024, 4), (2, 1024, 2))),
        Choice(single, "EXPAND", "expand_row", pieces((8, 128, 1), (8, 256, 1), (8, 512, 4), (16, 128, 1))),
    ]


def kernel_ms(kernel: str, work: Callable[[], object]) -> float:
    """Milliseconds of all launches of `kernel` in one call of `work`, after a call that compiles."""
    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profiler.key_averages() if event.key == kernel) / 1e3


def compared(choices: Sequence[Choice], work: Callable[[], object]) -> None:
    """Compare the values; each constant keeps its fastest one while the next are tried."""
    for choice in choices:
        taken = []
        for value in choice.values:
            setattr(choice.module, choice.constant, value)
            taken.append((kernel_ms(choice.kernel, work), value))
        taken.sort(key=lambda each: each[0])
        setattr(choice.module, choice.constant, taken[0][1])
        found = ", ".join(f"{ms:.3f} {tuple(value)}" for ms, value in taken)
        print(f"{choice.module.__name__}.{choice.constant} ({choice.kernel}): {found}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Tiles of the adapters' kernels on this GPU.")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rank", type=int, default=8)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(f"bench/gpu_tiles.py needs a CUDA device; torch {torch.__version__} finds none", file=sys.stderr)
        return 2
    device = torch.device("cuda", 0)
    decoder = random_decoder(replace(SHAPES["qwen3-30b-a3b"], num_layers=args.layers), device, torch.bfloat16)
    shape = AdapterShape(decoder.config, args.rank)
    adapters = [Adapter.init(shape, seed, scale=2.0, device=device) for seed in range(TENANTS)]
    grads = [Adapter.zeros(shape, device=device) for _ in adapters]
    compared(trained(), Pass.of(decoder, lengths_of(TOKENS, TENANTS, SEQUENCE), adapters, grads).step)
    decode(decoder, adapters)
    return 0


@torch.inference_mode()
def decode(decoder: Decoder, adapters: Sequence[Adapter]) -> None:
    from bench.parts.gpu_decode import Batch

    compared(decoded(), Batch.of(decoder, TENANTS, LENGTH).step(adapters).compute)


if __name__ == "__main__":
    sys.exit(main())
