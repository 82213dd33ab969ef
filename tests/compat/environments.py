"""One virtual environment for each version of the official SDK, kept under `.compat/` in the checkout.

An environment has the SDK and what it asks for, and borrows torch (which some calls of the SDK need, and which is ten
times the size of the rest) from the environment that runs this.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".compat"

#: The oldest that we know (the one that ART's backend asks for) and the newest.
IN_CI = ("0.18.2", "0.38.0")
ALL = ("0.18.2", "0.25.0", "0.26.2", "0.27.2", "0.29.1", "0.30.0", "0.34.0", "0.36.0", "0.38.0")


def build(version: str) -> Path:
    """The Python of that version's environment, which is made where it is not there yet."""
    folder = HOME / version
    python, stamp = folder / "bin" / "python", folder / ".complete"
    if not stamp.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
        subprocess.run([*pip, f"tinker=={version}"], check=True)
        packages = next((folder / "lib").glob("python3*")) / "site-packages"
        (packages / "zz-borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        stamp.touch()
    return python


def build_all(versions: tuple[str, ...]) -> dict[str, Path]:
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(versions, pool.map(build, versions), strict=True))
