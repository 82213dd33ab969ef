"""`python -m tests.workers.model.compiling GPU DTYPE RANK...` compiles each kernel that training passes and a decode
step launch for that GPU (90: Hopper, 80: Ampere), as Triton would at the launch. It prints each kernel's name, bytes
of shared memory and bytes of a thread's stack, as JSON.

The passes run the device's code on the CPU, and kernels are compiled instead of run: what they would have written
stays as it was. The widths are Qwen3-30B-A3B's.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from workers.model.adapters.adapter import Adapter
from workers.model.adapters.shape import AdapterShape
from workers.model.attend import PackedAttend
from workers.model.config import DecoderConfig
from workers.model.decoder import Decoder
from workers.model.gpu import launch
from workers.model.gpu.experts import expert_mm, sort_pairs
from workers.model.gpu.segments import forms, rewritable
from workers.model.logprobs import target_logprobs
from workers.model.lora import products
from workers.model.lora.rows import LoraRows

CPU = torch.device("cpu")
CONFIG = DecoderConfig(
    architecture="Qwen3MoeForCausalLM", vocab_size=8192, hidden_size=2048, num_layers=1, num_heads=32, num_kv_heads=4,
    head_dim=128, intermediate_size=6144, context_length=128, num_experts=8, experts_per_token=8,
    moe_intermediate_size=768,
)  # fmt: skip
LENGTH = 8


class Absent(NamedTuple):
    """The driver of a GPU that this machine does not have."""

    target: GPUTarget

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


class Compiled:
    """Replaces launches: compiles each form of a kernel once, and only one of those that differ just in lengths."""

    def __init__(self) -> None:
        self.forms: dict[Any, Any] = {}
        self._launch = JITFunction.run

    def run(self, kernel: JITFunction[Any], *arguments: Any, grid: Any, **fixed: Any) -> None:
        lengths = {"SPLIT", "STACK", "warmup"}
        form = (
            kernel.__name__,
            *sorted((name, value) for name, value in fixed.items() if name not in lengths),
            *(of.dtype for of in arguments if isinstance(of, torch.Tensor) and of.dtype.is_floating_point),
        )
        if form not in self.forms:
            self.forms[form] = self._launch(kernel, *arguments, **fixed | {"grid": grid, "warmup": True})


def adapted(ranks: list[int]) -> list[Adapter]:
    return [Adapter.init(AdapterShape(CONFIG, rank), 1, scale=1.0, device=CPU) for rank in ranks]


def decoder_of(dtype: torch.dtype) -> Decoder:
    decoder = Decoder(CONFIG, dtype, CPU)
    for weight in decoder.parameters():
        weight.data.zero_()
    return decoder


def train(decoder: Decoder, ranks: list[int]) -> None:
    """Forward and backward of one sequence for each rank, and one without an adapter."""
    adapters = [*adapted(ranks), None]
    grads = [of and Adapter(of.shape, torch.zeros_like(of.flat), 1.0) for of in adapters]
    count = len(adapters)
    rows = LoraRows(range(0, LENGTH * count + 1, LENGTH), adapters, grads)
    tokens = torch.zeros(LENGTH * count, dtype=torch.long)
    hidden = decoder(tokens, torch.arange(LENGTH).repeat(count), PackedAttend([LENGTH] * count), rows)
    target_logprobs(decoder, hidden, torch.arange(len(tokens)), tokens, rows, chunk=len(tokens)).sum().backward()


def decode(decoder: Decoder, ranks: list[int]) -> None:
    """One token of each adapter, and the products of experts in a captured graph."""
    adapters = adapted(ranks)
    rows, table = rewritable(forms(adapters), len(adapters), CPU)
    table.rewrite(LoraRows(range(len(adapters) + 1), adapters))
    tokens = torch.zeros(len(adapters), dtype=torch.long)
    with torch.no_grad():
        decoder.logits(decoder(tokens, tokens, PackedAttend([1] * len(adapters)), rows), rows)
    sort_pairs(tokens, 1, CONFIG.num_experts)
    dtype, ends_E = next(decoder.parameters()).dtype, torch.ones(CONFIG.num_experts, dtype=torch.int32)
    expert_mm(torch.zeros(1, 2048, dtype=dtype), torch.zeros(CONFIG.num_experts, 768, 2048, dtype=dtype), ends_E)


def stack_bytes(cubin: bytes) -> int:
    with NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(int(found) for found in re.findall(r"STACK:(\d+)", said))


if __name__ == "__main__":
    driver.set_active(Absent(GPUTarget("cuda", int(sys.argv[1]), 32)))
    compiled = Compiled()
    JITFunction.run = lambda kernel, *arguments, **fixed: compiled.run(kernel, *arguments, **fixed)
    products.on_device = lambda weight: True
    made, wanted = decoder_of(getattr(torch, sys.argv[2])), [int(rank) for rank in sys.argv[3:]]
    train(made, wanted)
    launch.FEW_BLOCKS = 0  # as with many arenas
    train(made, wanted)
    decode(made, wanted)
    found = [
        (str(form), binary.metadata.shared, stack_bytes(binary.asm["cubin"])) for form, binary in compiled.forms.items()
    ]
    print(json.dumps(found))
