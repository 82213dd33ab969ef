"""The kernels as on other processors: with narrower vectors, and by compilers that fuse sums in some loops only."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forked import run_forked

HERE = Path(__file__).parent
KERNELS = ("test_native.py", "test_gemm.py", "test_joined.py", "test_alone.py")
RUN = """
import sys
import pytest
from workers.model.native import build
assert not build.library.cache_info().currsize, "what it is forked from has compiled them already"
build._FLAGS = (*(flag for flag in build._FLAGS if flag != "-march=native"), *sys.argv[1].split())
assert build.library() is not None
# How libraries are kept, and made where there is no folder or compiler, is no matter of flags.
others = "not kept and not compiles_once and not without_a_compiler"
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-k", others, *sys.argv[2:]]))
"""


def runs_here(flags: str) -> bool:
    known = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return "v3" not in flags or {"avx2", "fma"} <= set(known.split())


@pytest.mark.parametrize("flags", ["-march=x86-64", "-march=x86-64-v3 -mtune=znver3"], ids=["four", "eight, for Zen"])
def test_rows_keep_their_bits_on_any_processor(flags: str) -> None:
    if not runs_here(flags):
        pytest.skip(f"this processor does not run {flags}")
    ended = run_forked("-c", RUN, flags, *(str(HERE / name) for name in KERNELS))
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-1000:]
