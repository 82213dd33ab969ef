"""Every version of the official SDK tours one real server.

`python -m tests.compat.tour [versions...]` writes the outcomes to `tests/compat/results.json`, of which
`tests.compat.page` makes `docs/compatibility.md`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.compat.environments import ALL, ROOT, build_all
from tests.e2e.conftest import Weftd
from workers.model.tiny import TINY_NAME

RESULTS = Path(__file__).with_name("results.json")
TOUR_S = 240


def tour(python: Path, server: Weftd, folder: Path) -> dict[str, Any]:
    """The outcome of each call, by its name."""
    out = folder / "calls.json"
    command = [str(python), "-m", "smoke", "--model", TINY_NAME, "--out", str(out)]
    done = subprocess.run(
        command, cwd=folder, env=_environment(server, folder), capture_output=True, text=True, timeout=TOUR_S
    )
    if not out.exists():
        raise AssertionError(f"the tour did not start: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(out.read_text())
    if done.returncode != 0:
        found["calls"]["the tour itself"] = {"result": "fail", "reason": done.stderr[-2000:]}
    return found


def _environment(server: Weftd, folder: Path) -> dict[str, str]:
    """Environment variables for the tour: nothing is fetched but from the server, which is the hub of tokenizers too,
    nothing is reported, and nobody's own settings are used."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TINKER_", "PYTHON", "HF_"))}
    key = server.key("compat")
    return {
        **kept,
        "TINKER_BASE_URL": server.url,
        "TINKER_API_KEY": key,
        "TINKER_PROJECT_ID": "smoke",
        "TINKER_TELEMETRY": "0",
        "HF_ENDPOINT": f"{server.url}/hub",
        "HF_TOKEN": key,
        "HF_HOME": str(folder / "hub"),
        "PYTHONPATH": str(ROOT / "tests" / "compat"),
    }


def main(versions: tuple[str, ...]) -> int:
    """Tour with all versions and write down the results. Returns the number of failed calls."""
    failed = 0
    results: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = Weftd(folder / "data").start()
        try:
            for version, python in build_all(versions).items():
                calls = tour(python, server, _fresh(folder / version))["calls"]
                results[version] = {call: row["result"] for call, row in calls.items()}
                bad = {call: row["reason"] for call, row in calls.items() if row["result"] == "fail"}
                failed += len(bad)
                print(f"tinker {version}: {len(calls)} calls, {len(bad)} failed", flush=True)
                for call, reason in bad.items():
                    print(f"  {call}: {reason}", flush=True)
        finally:
            server.stop()
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return failed


def _fresh(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


if __name__ == "__main__":
    sys.exit(1 if main(tuple(sys.argv[1:]) or ALL) else 0)
