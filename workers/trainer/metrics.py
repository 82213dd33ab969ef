"""Metrics that stay right when an operation is computed in parts.

Every metric is named `name:reduction` with exactly one colon, the form in which Tinker clients merge chunks. A part
contributes a total and a weight; parts are added in data order in Python floats, so the result does not depend on who
shares the passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Measure:
    """One part's share of a metric: a sum is `total`, a mean is `total / weight`, a max is `total`."""

    total: float
    weight: float = 1.0


def merge_measures(into: dict[str, Measure], part: Mapping[str, Measure]) -> None:
    """Add one part's measures to those of the parts before it."""
    for name, measure in part.items():
        reduction = name.rpartition(":")[2]
        seen = into.get(name)
        if seen is None:
            into[name] = measure
        elif reduction == "max":
            into[name] = Measure(max(seen.total, measure.total))
        else:
            into[name] = Measure(seen.total + measure.total, seen.weight + measure.weight)


def metric_values(measures: Mapping[str, Measure]) -> dict[str, float]:
    """Reduce to plain numbers. A mean over nothing (no position in the loss) is 0, so that the key is always there:
    clients drop a metric that any chunk lacks."""
    return {
        name: (measure.total / measure.weight if measure.weight else 0.0) if name.endswith(":mean") else measure.total
        for name, measure in measures.items()
    }
