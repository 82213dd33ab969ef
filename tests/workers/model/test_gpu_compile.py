"""Every kernel that training and decode steps launch compiles for the GPUs we support, fits there, and keeps its values
in registers. Triton and its assembler need no GPU for that, but a process of their own: in this one Triton may be the
interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

#: Hopper (H100, H200) and Ampere (A100): bytes of shared memory that one block may have.
SHARED_BYTES = {90: 227 << 10, 80: 163 << 10}
#: Bytes of a thread's stack that cost nothing: versions of Triton differ by a few. Spilled sums take hundreds.
STACK_BYTES = 32

KERNELS = {
    "add_norm", "add_norm_backward", "at_targets", "at_targets_backward", "expand", "expand_row", "expert_blocks",
    "experts", "gather", "gather_sum", "gather_sum_expand", "log_sum", "log_sum_backward", "outer", "shrink",
    "shrink_row", "sort_pairs", "swiglu", "swiglu_backward", "turn", "turn_backward",
}  # fmt: skip


@pytest.mark.parametrize(
    ("gpu", "dtype", "ranks"),
    [
        (90, "bfloat16", (32,)),
        pytest.param(80, "float32", (8, 128), marks=pytest.mark.long),
        pytest.param(90, "bfloat16", (8, 64, 128), marks=pytest.mark.long),
        pytest.param(80, "bfloat16", (8, 32, 64, 128), marks=pytest.mark.long),
    ],
)
def test_kernels_compile_for_the_gpus_we_mean(gpu: int, dtype: str, ranks: tuple[int, ...]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, "-m", "tests.workers.model.compiling", str(gpu), dtype, *map(str, ranks)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = set()
    for form, shared_bytes, stack_bytes in json.loads(done.stdout):
        kernels.add(form.split("'")[1])
        assert shared_bytes <= SHARED_BYTES[gpu], f"{form} wants {shared_bytes} bytes of shared memory"
        assert stack_bytes <= STACK_BYTES or "'ieee'" in form, f"{form} spills {stack_bytes} bytes of registers"
    assert kernels == KERNELS
