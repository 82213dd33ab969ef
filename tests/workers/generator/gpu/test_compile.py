"""The kernels of decode steps, prefills and copies of pages compile to machine code for the GPUs we mean, in every form
that they are asked for. In a process of its own, because the interpreter of the other tests excludes it."""

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
from workers.generator.gpu import kernels, prefill_kernels
from workers.generator.gpu.attend import MAX_SPLITS, MIN_PAGES
from workers.generator.gpu.pages import BLOCK
from workers.generator.gpu.prefill import Shape
from workers.generator.cache.kv_cache import PAGE_TOKENS

def compiled(name, capability, groups, dim, precision, dtype, window=0, sinks=False):
    if name == "copy_pages":
        types = {"table_3B": "*i64", "tensors": "i32", "pairs_C2": "*i64", "BLOCK": "constexpr"}
        return built(prefill_kernels.copy_pages, {"BLOCK": BLOCK}, types, capability)
    if hasattr(prefill_kernels, name):
        return prefill(name, capability, groups, dim, precision, dtype, window, sinks)
    kernel = getattr(kernels, name)
    block = 1 << (dim - 1).bit_length()
    fixed = {"HEADS": 4, "GROUPS": groups, "ALL_HEADS": 4 * groups, "DIM": dim, "PAGE": PAGE_TOKENS}
    fixed |= {"SPLITS": MAX_SPLITS, "MIN_PAGES": MIN_PAGES, "PRECISION": precision, "WINDOW": window, "SINKS": sinks}
    fixed |= {"BLOCK_G": max(16, groups), "BLOCK_D": max(16, block)}
    fixed = {name: value for name, value in fixed.items() if name in kernel.arg_names}
    types = {"table_RW": "*i32", "positions_R": "*i64", "scale_log2": "fp32"}
    types |= dict.fromkeys(("sums_RHSD", "tops_RHS", "masses_RHS", "sinks_H"), "*fp32")
    types |= dict.fromkeys(("stride_k", "stride_v", "stride_q", "width"), "i32") | dict.fromkeys(fixed, "constexpr")
    return built(kernel, fixed, {name: "*" + dtype for name in kernel.arg_names} | types, capability)

def prefill(name, capability, groups, dim, precision, dtype, window, sinks):
    kernel, shape = getattr(prefill_kernels, name), Shape.of(dim, groups, 2 if dtype == "bf16" else 4)
    fixed = {"HEADS": 4, "GROUPS": groups, "DIM": dim, "PAGE": PAGE_TOKENS, "WINDOW": window, "SINKS": sinks}
    fixed |= {"PRECISION": precision, "BLOCK_M": shape.rows, "BLOCK_D": shape.columns}
    fixed = {name: value for name, value in fixed.items() if name in kernel.arg_names}
    types = dict.fromkeys(("blocks_B3", "tiles_B5", "pages"), "*i32") | {"sinks_H": "*fp32", "scale_log2": "fp32"}
    types |= dict.fromkeys(("stride_k", "stride_v", "stride_q"), "i32") | dict.fromkeys(fixed, "constexpr")
    options = {"num_warps": shape.warps, "num_stages": shape.stages}
    return built(kernel, fixed, {name: "*" + dtype for name in kernel.arg_names} | types, capability, options)

def built(kernel, fixed, types, capability, options=None):
    signature = {argument: types[argument] for argument in kernel.arg_names}
    places = {(kernel.arg_names.index(argument),): value for argument, value in fixed.items()}
    # As Triton finds them when it is called: tensors begin at 16 bytes, rows are multiples of 16 elements.
    even = [argument for argument, of in signature.items() if of.startswith("*") or argument.startswith("stride")]
    attributes = {(kernel.arg_names.index(argument),): [["tt.divisibility", 16]] for argument in even}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)

found = []
for form in json.loads(sys.argv[1]):
    binary = compiled(*form)
    ahead = binary.asm["ptx"].count("cp.async.c")
    found.append([len(binary.asm["cubin"]), binary.metadata.shared, ahead])
print(json.dumps(found))
"""

#: Kernel, GPU, queries of a kv head, head dim, precision, dtype of the cache, window, whether there are sinks.
FORMS: list[tuple[Any, ...]] = [
    *((name, 90, 8, 128, "tf32", "bf16") for name in ("store", "partial", "combine")),
    *((name, 80, 4, 64, "tf32", "bf16") for name in ("store", "partial", "combine")),
    ("partial", 80, 1, 256, "ieee", "fp32"),
    ("partial", 80, 32, 80, "tf32", "bf16"),
    *((name, 90, 8, 64, "tf32", "bf16", 128, True) for name in ("partial", "combine")),
    ("combine", 90, 8, 64, "tf32", "bf16", 0, True),
    ("store_blocks", 90, 8, 128, "tf32", "bf16"),
    ("attend_tiles", 90, 8, 128, "tf32", "bf16"),
    ("attend_tiles", 90, 8, 64, "tf32", "bf16", 128, True),
    ("attend_tiles", 80, 4, 256, "tf32", "bf16"),
    ("attend_tiles", 80, 1, 256, "ieee", "fp32"),
    ("copy_pages", 90, 0, 0, "", ""),
]
#: Of these there is one above that has as little room, or less.
OTHERS: list[tuple[Any, ...]] = [
    ("partial", 90, 1, 256, "ieee", "fp32"),
    ("attend_tiles", 80, 8, 128, "tf32", "bf16"),
]


@pytest.mark.parametrize("forms", [FORMS, pytest.param(OTHERS, marks=pytest.mark.long)], ids=["forms", "others"])
def test_kernels_compile_for_the_gpus_we_mean(forms: list[tuple[Any, ...]]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(forms)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for form, (cubin_bytes, shared_bytes, ahead) in zip(forms, json.loads(done.stdout), strict=True):
        assert cubin_bytes > 0
        assert ahead or form[0] not in ("partial", "attend_tiles"), f"{form} waits for each page, element by element"
        assert shared_bytes <= SHARED_BYTES[form[1]], f"{form} wants {shared_bytes} bytes of shared memory"
