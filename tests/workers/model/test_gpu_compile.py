"""Every kernel compiles to machine code for the GPUs we mean, in every form that launch.py asks for: Triton and its
assembler need no GPU for that. In a process of its own, because the interpreter of the other tests excludes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

#: Hopper (H100, H200) and Ampere (A100): bytes of shared memory that one block may have.
SHARED_BYTES = {90: 227 << 10, 80: 163 << 10}

PROGRAM = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from workers.model.gpu import (
    combine, experts, fused_kernels, gate, heads, kernels, launch, single, single_kernels, softmax, softmax_kernels
)
from workers.model.gpu.segments import DENSE_ROWS, EXPERT_ROWS

POINTERS = {"u": "*fp32", "scales": "*fp32"} | dict.fromkeys(
    ("addresses", "ranks", "block_segment", "first_block", "segment_start", "owner_start", "owner_groups", "token",
     "expert"), "*i64"
)

def base(capability, dtype):
    fixed = {"BLOCK_M": EXPERT_ROWS, "BLOCK_N": experts.BLOCK_N, "BLOCK_K": experts.BLOCK_K}
    types = dict.fromkeys(("block_expert", "first_block", "ends"), "*i32") | dict.fromkeys(fixed, "constexpr")
    types |= dict.fromkeys(("x", "weight", "y"), "*" + dtype)
    return built(kernels.experts, fixed, types, capability)

def of_row(name, capability, wide, dtype):
    fixed = {"PAIRED": True, "STACK": 1, "SCALED": True}
    if name == "shrink_row":
        piece = single.shrink_piece(wide)
        fixed |= {"BLOCK_R": piece.ranks, "BLOCK_K": piece.columns}
    else:
        piece = single.expand_piece(wide)
        fixed |= {"BLOCK_R": piece.ranks, "BLOCK_N": piece.columns}
    types = POINTERS | {"x": "*" + dtype, "y": "*" + dtype} | dict.fromkeys(fixed, "constexpr")
    return built(getattr(single_kernels, name), fixed, types, capability)

def of_experts(name, capability, pairs):
    tensors = ("chosen", "experts", "order", "inverse", "token")
    types = dict.fromkeys(tensors, "*i64") | dict.fromkeys(("ends", "block_expert", "first_block"), "*i32")
    if name == "sort_pairs":
        fixed = {"BLOCK": experts.TOGETHER, "BLOCK_P": pairs}
    else:
        fixed = {"BLOCK_M": EXPERT_ROWS, "BLOCK_E": pairs, "BLOCK_B": experts.TOGETHER}
    return built(getattr(kernels, name), fixed, types | dict.fromkeys(fixed, "constexpr"), capability)

def compiled(name, capability, rank_block, precision, dtype, rows=DENSE_ROWS):
    if name == "experts":
        return base(capability, dtype)
    if name in ("expert_blocks", "sort_pairs"):
        return of_experts(name, capability, rows)
    if hasattr(fused_kernels, name) or hasattr(softmax_kernels, name):
        return fused(name, capability, rank_block, precision, dtype)
    if hasattr(single_kernels, name):
        return of_row(name, capability, rows, dtype)
    kernel = getattr(kernels, name)
    fixed = {"STACK": 3, "SCALED": True, "PRECISION": precision, "BLOCK_M": rows, "BLOCK_R": rank_block}
    if name == "shrink":
        fixed |= {"BLOCK_K": launch.SHRINK.columns, "SPLIT": launch.MAX_SPLIT}
    else:
        outer = launch.OUTER_EXPERTS if rows == EXPERT_ROWS else launch.OUTER
        tile = (launch.EXPAND if name == "expand" else outer).beside(rank_block)
        fixed |= {"BLOCK_N": tile.columns} | ({"STAGES": 1 if rows == EXPERT_ROWS else 3} if name == "outer" else {})
    types = POINTERS | {"x": "*" + dtype, "y": "*" + dtype} | dict.fromkeys(fixed, "constexpr")
    return built(kernel, fixed, types, capability)

def fused(name, capability, rank_block, precision, dtype):
    kernel = getattr(fused_kernels, name, None) or getattr(softmax_kernels, name)
    names = set(kernel.arg_names)
    tile = (gate.BACKWARD if "backward" in name else gate.FORWARD).beside(rank_block)
    fixed = {"ADAPTED": rank_block > 0, "PRECISION": precision}
    fixed |= {"BLOCK_M": EXPERT_ROWS, "BLOCK_R": rank_block or 16}
    fixed |= {"CHOICES": 8, "WEIGHTED": True, "NORMED": True, "HEADS": heads.HEADS, "BLOCK_D": 128}
    if name.startswith("log_sum"):
        tile = (softmax.BACKWARD if "backward" in name else softmax.FORWARD).beside(rank_block)
        fixed |= {"BLOCK_M": DENSE_ROWS, "SPLIT": softmax.SPLIT}
    if name.startswith("at_targets"):
        fixed |= {"BLOCK_R": softmax.TOGETHER, "BLOCK_P": softmax.TOGETHER}
    fixed |= {"DIVIDED": True, "KEPT": True, "HELD": 0 < rank_block <= launch.HELD}
    if name == "swiglu":
        fixed["SPLIT"] = gate.SPLIT
        tile = gate.FORWARD_HELD if fixed["HELD"] else tile
    if name == "gather_sum_expand":
        fixed |= {"BLOCK_M": DENSE_ROWS, "STACK": 2}
        tile = combine.ADDED.beside(rank_block)
    if name.startswith("add_norm"):
        fixed |= {"ADDED": True, "BLOCK_D": 4096}
    fixed |= {"BLOCK_N": combine.WIDTH if name in ("gather", "gather_sum") else tile.columns}
    if name == "gather":
        fixed |= {"BLOCK_P": combine.COPIED // combine.WIDTH}
    types = POINTERS | dict.fromkeys(("inverse", "gate_b", "up_b", "down_a", "factors"), "*i64")
    types |= dict.fromkeys(("targets", "row_of", "first", "group_of_row", "token"), "*i64") | {"dx": "*" + dtype}
    types |= dict.fromkeys(("weights", "dweights", "dv", "norm", "cos", "sin", "logits", "divisors"), "*fp32")
    types |= dict.fromkeys(("found", "sums", "dsums", "logprobs", "dlogprobs", "delta", "total", "dtotal"), "*fp32")
    types |= dict.fromkeys(("gate_up", "h", "dh", "dgate_up", "y", "dout", "dlogits"), "*" + dtype)
    types |= {"eps": "fp32", "x": "*" + (dtype if name == "gather" else "fp32")}
    types |= {"out": "*" + ("fp32" if name.startswith("gather_sum") else dtype)}
    if name.startswith("add_norm"):
        types |= {"dx": "*fp32"}
    fixed = {argument: value for argument, value in fixed.items() if argument in names}
    return built(kernel, fixed, types | dict.fromkeys(fixed, "constexpr"), capability)

def built(kernel, fixed, types, capability):
    signature = {argument: types.get(argument, "i32") for argument in kernel.arg_names}
    places = {(kernel.arg_names.index(argument),): value for argument, value in fixed.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))

found = []
for form in json.loads(sys.argv[1]):
    binary = compiled(*form)
    found.append([len(binary.asm["cubin"]), binary.metadata.shared])
print(json.dumps(found))
"""

GPUS = ((90, "bf16"), (80, "fp32"))
_EITHER = ("turn", "turn_backward", "gather", "gather_sum", "add_norm", "add_norm_backward")
FORMS: list[tuple[Any, ...]] = [
    *((name, 90, block, "tf32", "fp32") for name in ("shrink", "expand", "outer") for block in (16, 64, 128)),
    *((name, 90, 32, "ieee", "fp32") for name in ("shrink", "expand", "outer")),
    *((name, 80, 32, "tf32", "bf16") for name in ("shrink", "expand", "outer")),
    # Of experts, whose runs are short.
    *((name, 90, 16, "tf32", "fp32", 16) for name in ("shrink", "expand", "outer")),
    ("outer", 80, 128, "tf32", "fp32", 16),
    *((name, gpu, 0, "", "", 1024) for name in ("expert_blocks", "sort_pairs") for gpu in (80, 90)),
    # Of decode steps, by the width of the base.
    *((name, 90, 0, "", "fp32", wide) for name in ("shrink_row", "expand_row") for wide in (768, 4096, 151936)),
    *((name, 80, 0, "", "bf16", 40) for name in ("shrink_row", "expand_row")),
    # Of what lies between products, without adapters and beside ranks of a block.
    *((name, 90, block, "tf32", "bf16") for name in ("swiglu", "swiglu_backward") for block in (0, 16, 128)),
    *((name, 80, 32, "ieee", "fp32") for name in ("swiglu", "swiglu_backward")),
    *((name, gpu, 16, "", dtype) for name in _EITHER for gpu, dtype in GPUS),
    *(("gather_sum_expand", 90, block, "tf32", "bf16") for block in (16, 128)),
    ("gather_sum_expand", 80, 32, "ieee", "fp32"),
    *((name, 90, block, "tf32", "bf16") for name in ("log_sum", "log_sum_backward") for block in (0, 16, 128)),
    *((name, 80, 32, "ieee", "fp32") for name in ("log_sum", "log_sum_backward", "at_targets", "at_targets_backward")),
    *((name, 90, 0, "", "bf16") for name in ("at_targets", "at_targets_backward")),
    *(("experts", gpu, 0, "", dtype) for gpu, dtype in GPUS),
]


def test_kernels_compile_for_the_gpus_we_mean() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(FORMS)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for form, (cubin_bytes, shared_bytes) in zip(FORMS, json.loads(done.stdout), strict=True):
        assert cubin_bytes > 0
        assert shared_bytes <= SHARED_BYTES[form[1]], f"{form} wants {shared_bytes} bytes of shared memory"
