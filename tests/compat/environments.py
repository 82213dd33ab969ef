"""Virtual environments with other versions of what our users have, kept under `.compat/` in the checkout.

There is one for each version of the official SDK, and there are those of `loaders`. Each installs only the differing
versions and borrows the rest, where it fits, from the environment that runs this: torch alone is ten times the size of
all else."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".compat"

#: The oldest version that we know of (ART's backend asks for it) and the newest.
IN_CI = ("0.18.2", "0.38.0")
ALL = ("0.18.2", "0.25.0", "0.26.2", "0.27.2", "0.29.1", "0.30.0", "0.34.0", "0.36.0", "0.38.0")


def environment(name: str, *installed: tuple[str, ...]) -> Path:
    """The Python of an environment, which is made if there is none: each of `installed` is given to a pip of its
    own."""
    folder = HOME / name
    python, stamp = folder / "bin" / "python", folder / ".complete"
    if not stamp.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
        packages = next((folder / "lib").glob("python3*")) / "site-packages"
        (packages / "zz-borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        for what in installed:
            pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", *what]
            subprocess.run(pip, check=True)
        stamp.touch()
    return python


def build(version: str) -> Path:
    """The Python of the environment with that version of the SDK."""
    return environment(version, (f"tinker=={version}",))


def build_all(versions: tuple[str, ...]) -> dict[str, Path]:
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(versions, pool.map(build, versions), strict=True))
