"""`make gpu-check` says that there is no device, and reports steps that fail or take too long."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import psutil
import pytest
import torch

from store.load_settings import load_settings
from tests.waiting import until

#: A step that prints its line only when it is interrupted, and has started a process that would go on.
LONG = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "60"])
try:
    open(os.environ["READY"], "w").close()
    time.sleep(60)
except KeyboardInterrupt:
    print(os.environ["SAYS"], child.pid, sep="\\n")
"""
SCRIPT = Path(__file__).parents[2] / "deploy" / "gpu" / "check.py"


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["gpu_check"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_it_says_that_there_is_no_device(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--out", tmp_path / "out"], capture_output=True, text=True)
    assert done.returncode == 3
    assert "there is no CUDA device" in done.stderr
    assert not (tmp_path / "out").exists()


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_every_step_ends_and_is_reported(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    ready = tmp_path / "ready"

    class Patient(subprocess.Popen[bytes]):
        """The step's second begins when its program runs: on a busy machine the start alone may take longer."""

        def wait(self, timeout: float | None = None) -> int:
            until(lambda: timeout != 1 or ready.exists())
            return super().wait(timeout)

    monkeypatch.setattr(check.subprocess, "Popen", Patient)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell that starts `make` in the background
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    python = [sys.executable, "-c"]
    todo = [
        check.Step("good", [*python, "print('3 passed')"], 60),
        check.Step("bad", [*python, "raise SystemExit(4)"], 60),
        check.Step("long", [*python, LONG], 1, {"SAYS": "12 passed so far", "READY": str(ready)}),
    ]
    check.run(todo, tmp_path, dict(os.environ))
    found = json.loads((tmp_path / "summary.json").read_text())
    assert [each["outcome"] for each in found.values()] == ["passed", "failed with code 4", "ended, its time was over"]
    assert found["good"]["log"] == ["3 passed"]
    *said, child = found["long"]["log"]
    assert said == ["12 passed so far"]
    until(lambda: not runs(int(child)), 10)
    assert sum(step.limit_s for step in check.steps(tmp_path) if not step.apart) <= check.LIMIT_S < 9 * 60
    assert all(step.limit_s <= check.LIMIT_S for step in check.steps(tmp_path))
    assert all(
        path.exists() for path in [*check.TESTS, *map(Path, check.steps(tmp_path)[1].command[-len(check.SERVED) :])]
    )


def test_servers_of_the_served_step_compute_in_float32(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (served,) = (step for step in check.steps(tmp_path) if step.name == "served")
    for name, value in served.environment.items():
        monkeypatch.setenv(name, value)
    settings = load_settings(None, data_dir=tmp_path)
    assert settings.trainer.dtype == settings.generator.dtype == "float32"


def test_only_missing_packages_are_unpacked_from_the_bundle(check: ModuleType, tmp_path: Path) -> None:
    for name in ("pytest", "weft_missing"):
        with ZipFile(tmp_path / f"{name}-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "")
    assert check.unpack(sorted(tmp_path.glob("*.whl")), tmp_path / "packages") == ["weft_missing"]
    assert [path.name for path in (tmp_path / "packages").iterdir()] == ["weft_missing.py"]
