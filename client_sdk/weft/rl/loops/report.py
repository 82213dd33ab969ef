"""`Report`: what a loop returns, of RL or on fixed data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.rl.losses.loss import means


@dataclass
class Report:
    """How a loop went: the numbers of each step, and why it ended."""

    steps: list[dict[str, float]] = field(default_factory=list)
    ended: str = "done"
    spent_nusd: int = 0
    resumed_at: int = 0

    def curve(self, name: str) -> list[float]:
        return [step[name] for step in self.steps if name in step]


def plain(metrics: Mapping[str, float]) -> dict[str, float]:
    """Server metrics without their reduction: `loss:sum` becomes `loss`. If a name has several reductions, all but the
    mean keep theirs: `x/max`."""
    metrics = means(metrics)
    parts = {told: told.removeprefix("custom/").partition(":") for told in metrics}
    several = Counter(name for name, _, _ in parts.values())
    kept = {told: several[name] > 1 and how != "mean" for told, (name, _, how) in parts.items()}
    found = {f"{name}/{how}" if kept[told] else name: metrics[told] for told, (name, _, how) in parts.items()}
    return {name: value for name, value in found.items() if name != "step"}
