"""Helpers for tables of figures: results of benches, and cells."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def taken(found: dict[str, Any]) -> str:
    """The line that tells where a table's figures come from."""
    machine = found["machine"]
    return f"`{machine['command']}` on {machine['cpus']} cores at a load of {machine['load']:.1f}, {machine['at']}:"


def grid(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def table(found: dict[str, Any], head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    return f"{taken(found)}\n\n{grid(head, rows)}"


def number(value: float) -> str:
    """A number with three digits, in its readable form."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def numbers(values: Iterable[float]) -> list[str]:
    return [number(value) for value in values]


def claims(*names: str, only: Callable[[str], bool] = lambda name: True) -> str:
    """The claims of each run, and whether they hold."""
    parts = []
    for name in names:
        found = read(name)
        rows = [
            (each["name"], number(each["value"]), number(each["target"]), "yes" if each["holds"] else "no")
            for each in found["claims"]
            if only(each["name"])
        ]
        parts.append(table(found, ("what", "measured", "goal", "holds"), rows))
    return "\n\n".join(parts)
