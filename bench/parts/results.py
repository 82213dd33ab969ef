"""The common options and output of benches: figures, claims about them, and where they were measured."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def asked(doc: str | None, quick: str = "") -> argparse.ArgumentParser:
    """The arguments of a bench with the docstring `doc`; `quick` describes its quick variant."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--out", type=Path, help="write the figures here too")
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def tell(result: dict[str, Any], args: argparse.Namespace) -> None:
    keep(result, args)
    print(json.dumps(result, indent=None if args.json else 2))


def keep(result: dict[str, Any], args: argparse.Namespace) -> None:
    """Write the result to the file of `--out`."""
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """The machine and the versions with which figures were taken."""
    return {
        "command": shlex.join(["python", f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "cpus": len(os.sched_getaffinity(0)),  # `taskset` may have left fewer than there are
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": dict(filter(all, ((name, _version(name)) for name in ("torch", "tinker", "weft-server")))),
        "at": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _version(name: str) -> str:
    """A package's version; empty if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def claim(name: str, value: float, target: float, holds: bool) -> dict[str, Any]:
    return {"name": name, "value": round(value, 4), "target": target, "holds": holds}


def at_least(name: str, value: float, target: float) -> dict[str, Any]:
    return claim(name, value, target, value >= target)


def at_most(name: str, value: float, target: float) -> dict[str, Any]:
    return claim(name, value, target, value <= target)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]
