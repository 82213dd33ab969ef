"""Tests test the checkout that they are in: whatever is installed, from wherever they are started, each file alone."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]
#: A module of each room, and the client.
PACKAGES = ("api", "billing", "migrations", "scheduler", "store", "workers", "weft", "tests")

NAMES = f"""
from importlib.util import find_spec
for name in {PACKAGES}:
    print(find_spec(name).origin)
"""


def place_of(package: str) -> Path:
    found = find_spec(package)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin)


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_this_checkout_s(package: str) -> None:
    assert place_of(package).is_relative_to(CHECKOUT)


def test_started_processes_import_this_checkout(tmp_path: Path) -> None:
    """From any folder, as servers and workers are started."""
    ran = subprocess.run([sys.executable, "-c", NAMES], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [Path(line) for line in ran.stdout.split()] == [place_of(package) for package in PACKAGES]


def test_no_folder_of_tests_is_a_package_of_the_house() -> None:
    """`tests/scheduler` with an `__init__.py` would be `scheduler` to any process with `tests` on its path."""
    houses = {path.name for path in CHECKOUT.iterdir() if (path / "__init__.py").is_file()} | {"client_sdk"}
    assert [
        str(path) for path in (CHECKOUT / "tests").iterdir() if path.name in houses and (path / "__init__.py").is_file()
    ] == []


@pytest.mark.parametrize("folder", ["tests", pytest.param("/", marks=pytest.mark.long)])
def test_a_file_alone_from_any_folder(folder: str) -> None:
    """Without the environment variables of this process."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and "PYTEST" not in name}
    file = CHECKOUT / "tests" / "test_checkout.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-k", "packages_are", str(file)]
    ran = subprocess.run(command, cwd=CHECKOUT / folder, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


KERNEL = """
def chunk_gated_delta_rule(*args, **options):
    raise RuntimeError("0 active drivers")
"""
REFERENCE = """
import tests.conftest
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
sizes = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "head_dim": 8, "num_attention_heads": 2}
layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 1}
model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, **layers))
print(model(torch.zeros(1, 4, dtype=torch.long)).logits.isfinite().all().item())
import fla.ops.gated_delta_rule
"""


def test_references_are_computed_by_torch_whatever_kernels_are_installed(tmp_path: Path) -> None:
    """A stand-in for fla-core raises this error on a CPU; ours are imported afterwards."""
    folder = tmp_path / "fla" / "ops" / "gated_delta_rule"
    folder.mkdir(parents=True)
    for package in (folder.parent.parent, folder.parent):
        (package / "__init__.py").touch()
    (folder / "__init__.py").write_text(KERNEL)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])}
    ran = subprocess.run([sys.executable, "-c", REFERENCE], env=environment, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.strip()) == (0, "True"), ran.stderr
