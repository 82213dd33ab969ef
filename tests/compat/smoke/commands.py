"""The `tinker` command: each subcommand with its arguments and output, but in this process, for speed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from click.testing import CliRunner
from smoke.record import Tour
from tinker.cli.__main__ import main_cli


def command_line(tour: Tour, run_id: str, paths: dict[str, str | None], model: str) -> None:
    """Run every subcommand. `paths` are checkpoints of the run, and still exist afterwards."""
    state = paths["state"] or ""
    _command(tour, "version")
    _command(tour, "model list", shows=model)
    _command(tour, "auth status")
    _command(tour, "auth whoami", local=True)
    _command(tour, "run list", "--limit", "0", shows=run_id)
    _command(tour, "run info", run_id, shows=model)
    _command(tour, "checkpoint list", "--run-id", run_id, shows=state)
    _command(tour, "checkpoint info", state, shows="weights/s1")
    _command(tour, "checkpoint publish", state)
    _command(tour, "checkpoint unpublish", state)
    _command(tour, "checkpoint set-ttl", state, "--ttl", "7200")
    _writes(tour, "checkpoint download", lambda folder: (state, "--output", folder))
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    window = [f"{at:%Y-%m-%dT%H:%M:%SZ}" for at in (hour, hour + timedelta(hours=1))]
    _command(tour, "billing usage", *window, shows=model)
    _command(tour, "billing checkpoint-storage")
    session_id = run_id.partition(":")[0]
    _writes(tour, "session export-trace", lambda folder: (session_id, "--output", f"{folder}/trace.pftrace"))
    _command(tour, "checkpoint delete", state, "--yes")


def _writes(tour: Tour, name: str, arguments: Callable[[str], tuple[str, ...]]) -> None:
    """Run a command that writes something into a folder."""
    with tempfile.TemporaryDirectory() as folder:
        _command(tour, name, *arguments(folder))
        written = any(path.is_file() for path in Path(folder).rglob("*"))
    if tour.results[f"tinker {name}"]["result"] == "ok" and not written:
        tour.record(f"tinker {name}", "fail", "it wrote no file")


def _command(tour: Tour, name: str, *arguments: str, shows: str = "", local: bool = False) -> None:
    """Run one command. `shows`: text that it prints; `local`: the command itself refuses a plain API key."""
    call = f"tinker {name}"
    done = CliRunner().invoke(main_cli, ["-f", "json", *name.split(), *arguments], input="y\n")
    said = f"{done.output} {done.exception or ''}".strip()
    # 0.18's "checkpoint delete" calls its own command `list` instead of Python's, and never reaches a server.
    if "No such command" in said or "Got unexpected extra argument (tinker://" in said:
        tour.record(call, "absent")
    elif done.exit_code != 0 and not (local and "API key" in said):
        tour.record(call, "fail", said[-400:])
    elif shows not in done.output:
        tour.record(call, "fail", f"its output does not show {shows}: {done.output[-300:]}")
    else:
        tour.record(call, "ok")
