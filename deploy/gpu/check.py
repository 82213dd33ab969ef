"""Everything there is to check on a GPU, in under nine minutes: `make gpu-check`.

    python deploy/gpu/check.py [--only first tests served training decoding] [--out gpu-out]
    python deploy/gpu/check.py --only example       bench/gpu_served.py alone, which takes most of the time

For a bare machine with torch, triton and transformers and no network: what else is imported comes from the wheels in
.gpu-bundle (`make gpu-bundle`), except what is installed, through a virtual environment of this command's own. Its
steps: the tests that never had a turn; the others marked `gpu` and those of the kernels; a real server, by tests of
tests/e2e; bench/gpu.py in training and in decoding. Each has a share of the time; what it does not finish in it is
ended, and the next begins. Writes into --out ($OUT where that is set): a log of each step, the benches' JSON with the
kernels that took longest, and summary.json. Exit code 0: all passed; 1: something did not; 3: there is no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[2]
BUNDLE = ROOT / ".gpu-bundle"
#: Seconds for all steps together; a borrowed machine ends a command after ten minutes.
LIMIT_S = 535.0
#: Seconds that a step has after its time is over, to report how far it came.
LAST_WORDS_S = 8.0

#: Tests that have never run on a GPU (docs/performance.md), in a step of their own: a cold machine imports for half a
#: minute first.
FIRST = [ROOT / "tests/workers/model/base/test_holder.py", ROOT / "tests/workers/trainer/ranks/test_on_gpus.py"]
TESTS = [ROOT / "tests/workers/trainer/test_devices.py", ROOT / "tests/workers/generator/test_devices.py"]
TESTS += [ROOT / "tests/workers/generator/gpu", *sorted((ROOT / "tests/bench").glob("test_gpu*.py"))]
TESTS += sorted((ROOT / "tests/workers/model").glob("test_gpu_*.py"))
TESTS += [ROOT / "tests/workers/model/lora/test_base_mm.py"]
#: Commands that tests start, with their entry points.
COMMANDS = {
    "weftd": "weft_server import main",
    "weft": "weft.cli import main",
    "tinker": "tinker.cli.__main__ import cli",
}
SERVED = ["official_sdk", "weft_sdk", "losses", "sampling", "checkpoints", "crashes", "routing_replay", "trainers"]
#: The dtype of the servers in these tests: the tests compare samplers with trainers, and both with transformers, as
#: closely as float32 allows.
IN_FLOAT32 = {"WEFT_TRAINER__DTYPE": "float32", "WEFT_GENERATOR__DTYPE": "float32"}


@dataclass(frozen=True)
class Step:
    name: str
    command: Sequence[str]
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Whether it runs only if it is named.
    apart: bool = False


def steps(out: Path, python: str = sys.executable) -> list[Step]:
    test = [python, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--durations=10", "--tb=short"]
    bench = [python, str(ROOT / "bench" / "gpu.py"), "--rounds", "3", "--ranks", "8"]
    example = [python, str(ROOT / "bench" / "gpu_served.py"), "--out", str(out / "gpu_served.json")]
    served = [str(ROOT / f"tests/e2e/test_{name}.py") for name in SERVED]
    return [
        Step("first", [*test, "-m", "gpu", "-n", "4", *map(str, FIRST)], 100),
        Step("tests", [*test, "-n", "10", *map(str, TESTS)], 140),
        Step("served", [*test, "-n", "6", *served], 140, IN_FLOAT32),
        Step("training", [*bench, "--layers", "16", "--out", str(out / "training.json")], 75),
        Step("decoding", [*bench, "--decode", "--layers", "24", "--out", str(out / "decoding.json")], 80),
        Step("example", example, LIMIT_S, apart=True),
    ]


def run(todo: Sequence[Step], out: Path, environment: dict[str, str], limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Run the steps; returns each one's outcome, its seconds, and the end of its log."""
    found: dict[str, Any] = {}
    began = time.monotonic()
    for step in todo:
        left_s, start = limit_s - (time.monotonic() - began), time.monotonic()
        log = out / f"{step.name}.log"
        with log.open("w") as stream:
            process = subprocess.Popen(
                step.command, cwd=ROOT, env={**environment, **step.environment}, stdout=stream, stderr=stream,
                start_new_session=True, preexec_fn=interruptible,
            )  # fmt: skip
            try:
                code = process.wait(max(1.0, min(step.limit_s, left_s)))
                outcome = "passed" if code == 0 else f"failed with code {code}"
            except subprocess.TimeoutExpired:
                outcome = "ended, its time was over"
                end(process)
        ended = log.read_text().splitlines()[-3:]
        found[step.name] = {"outcome": outcome, "seconds": round(time.monotonic() - start, 1), "log": ended}
        print(f"{step.name:11} {outcome}: {' | '.join(ended[-1:])}", flush=True)
        (out / "summary.json").write_text(json.dumps(found, indent=2) + "\n")
    return found


def interruptible() -> None:
    """Called in a new process: one that was started in the background may ignore interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a step. An interrupted pytest still reports failures and the slowest tests. No process of the step's session
    is left."""
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(LAST_WORDS_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def unpack(wheels: Sequence[Path], folder: Path) -> list[str]:
    """Unpack the wheels of packages that are not installed; returns their names."""
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


def environment(folder: Path, packages: Path) -> Path:
    """Make a virtual environment with this Python's packages, the unpacked wheels, and the commands of this checkout;
    returns its Python."""
    venv.create(folder)
    (site,) = folder.glob("lib/*/site-packages")
    paths = [packages, ROOT, ROOT / "client_sdk", *site_packages()]
    (site / "weft.pth").write_text("".join(f"{path}\n" for path in paths))
    python = folder / "bin" / "python"
    for name, program in COMMANDS.items():
        command = folder / "bin" / name
        command.write_text(f"#!{python}\nimport sys\nfrom {program} as main\nsys.exit(main())\n")
        command.chmod(0o755)
    return python


def site_packages() -> list[Path]:
    """The folder from which this Python imports installed packages."""
    return [Path(path) for path in sys.path if path.endswith(("site-packages", "dist-packages"))]


def device() -> str:
    """The name of the device that computes; if there is none, prints why and returns ""."""
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
    parser.add_argument("--only", nargs="+", choices=[step.name for step in steps(Path())], help="these steps alone")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "gpu-out")))
    args = parser.parse_args()
    found = device()
    if not found:
        return 3
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="weft-gpu-") as folder:
        packages = Path(folder) / "packages"
        names = unpack(sorted(BUNDLE.glob("*.whl")), packages)
        print(f"gpu-check: {found}; from the bundle: {', '.join(names) or 'nothing'}", flush=True)
        python = environment(Path(folder) / "venv", packages)
        every = steps(out, str(python))
        todo = [step for step in every if (step.name in args.only if args.only else not step.apart)]
        paths = [str(ROOT), str(ROOT / "client_sdk"), *filter(None, [os.environ.get("PYTHONPATH")])]
        outcomes = run(todo, out, {**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    return 0 if all(each["outcome"] == "passed" for each in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
