"""All that there is to try on a GPU, in under nine minutes: `make gpu-check`.

    python deploy/gpu/check.py [--out gpu-out]

For a bare machine with torch, triton and transformers and no network: what else is imported comes from the wheels in
.gpu-bundle (`make gpu-bundle`), except what is installed. Runs the tests marked `gpu`, those of the kernels,
bench/gpu.py in training and decoding, and recurrences by fla-core. Each step has a share of the time; what it does not
finish in it is ended, and the next begins. Writes into --out ($OUT where that is set): a log of each step, the benches'
JSON with the kernels that took longest, and summary.json. Exit code 0: all passed; 1: something did not; 3: there is no
CUDA device.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[2]
BUNDLE = ROOT / ".gpu-bundle"
#: Of all steps together; a machine that is lent ends a command after ten minutes.
LIMIT_S = 535.0

KERNELS = [*sorted((ROOT / "tests/workers/model").glob("test_gpu_*.py")), ROOT / "tests/workers/model/test_base_mm.py"]
KERNELS += [ROOT / "tests/workers/generator/gpu"]
MARKED = [ROOT / "tests/workers/trainer/test_devices.py", ROOT / "tests/workers/generator/test_devices.py"]
MARKED += [ROOT / "tests/workers/model/base/test_holder.py"]
MARKED += [ROOT / "tests/workers/generator/gpu/test_capture.py", *sorted((ROOT / "tests/bench").glob("test_gpu*.py"))]
MARKED += [ROOT / "tests/workers/generator/gpu/test_ahead.py"]
#: By themselves: kernels of fla-core are compiled in many forms and tuned when they are first used.
RECURRENCES = ROOT / "tests/workers/model/test_gpu_fla.py"
KERNELS.remove(RECURRENCES)


@dataclass(frozen=True)
class Step:
    name: str
    command: Sequence[str]
    limit_s: float


def steps(out: Path) -> list[Step]:
    test = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=10"]
    bench = [sys.executable, str(ROOT / "bench" / "gpu.py"), "--rounds", "3"]
    return [
        Step("marked", [*test, "-m", "gpu", *map(str, MARKED)], 105),
        Step("kernels", [*test, "-m", "not gpu", *map(str, KERNELS)], 145),
        Step("training", [*bench, "--tenants", "1", "64", "--out", str(out / "training.json")], 140),
        Step("decoding", [*bench, "--decode", "--out", str(out / "decoding.json")], 90),
        Step("recurrences", [*test, str(RECURRENCES)], 55),
    ]


def run(todo: Sequence[Step], out: Path, environment: dict[str, str], limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Each step's outcome, seconds and the end of its log."""
    found: dict[str, Any] = {}
    began = time.monotonic()
    for step in todo:
        left_s, start = limit_s - (time.monotonic() - began), time.monotonic()
        log = out / f"{step.name}.log"
        with log.open("w") as stream:
            try:
                done = subprocess.run(
                    step.command, cwd=ROOT, env=environment, stdout=stream, stderr=stream,
                    timeout=max(1.0, min(step.limit_s, left_s)),
                )  # fmt: skip
                outcome = "passed" if done.returncode == 0 else f"failed with code {done.returncode}"
            except subprocess.TimeoutExpired:
                outcome = "ended, its time was over"
        ended = log.read_text().splitlines()[-3:]
        found[step.name] = {"outcome": outcome, "seconds": round(time.monotonic() - start, 1), "log": ended}
        print(f"{step.name:11} {outcome}: {' | '.join(ended[-1:])}", flush=True)
        (out / "summary.json").write_text(json.dumps(found, indent=2) + "\n")
    return found


def unpack(wheels: Sequence[Path], folder: Path) -> list[str]:
    """Unpack the wheels of what is not installed. Their names."""
    unpacked = []
    for wheel in wheels:
        name = wheel.name.partition("-")[0]
        try:
            distribution(name)
        except PackageNotFoundError:
            with ZipFile(wheel) as archive:
                archive.extractall(folder)
            unpacked.append(name)
    return unpacked


def device() -> str:
    """What computes; empty where nothing does, and why is printed."""
    try:
        import torch
    except ImportError as error:
        print(f"gpu-check: torch cannot be imported ({error}); nothing was run", file=sys.stderr)
        return ""
    if not torch.cuda.is_available():
        print(f"gpu-check: there is no CUDA device (torch {torch.__version__}); nothing was run", file=sys.stderr)
        return ""
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "gpu-out")))
    args = parser.parse_args()
    found = device()
    if not found:
        return 3
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="weft-gpu-") as packages:
        names = unpack(sorted(BUNDLE.glob("*.whl")), Path(packages))
        print(f"gpu-check: {found}; from the bundle: {', '.join(names) or 'nothing'}", flush=True)
        paths = [str(ROOT), str(ROOT / "client_sdk"), packages, *filter(None, [os.environ.get("PYTHONPATH")])]
        outcomes = run(steps(out), out, {**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    return 0 if all(each["outcome"] == "passed" for each in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
