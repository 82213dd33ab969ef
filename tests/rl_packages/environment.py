"""The packages that `weft.rl` can use, in an environment of their own.

`python -m tests.rl_packages.environment` makes it; its tests run where it is there.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".rl-packages"
PACKAGES = ("verifiers==0.1.14", "reasoning-gym==0.1.25", "renderers==0.1.12")


PYTHON, STAMP = FOLDER / "bin" / "python", FOLDER / ".complete"


def build() -> None:
    """About 830 MB."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(FOLDER)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(PYTHON), "install", "--quiet"]
    subprocess.run([*pip, *PACKAGES, "--editable", str(ROOT / "client_sdk")], check=True)
    STAMP.touch()


if __name__ == "__main__":
    build()
