"""Metrics that stay right when an operation is computed in parts, and how evenly its tokens spread over the experts.

Every metric is named `name:reduction` with exactly one colon, the form in which Tinker clients merge chunks. A part
contributes a total and a weight; parts are added in data order in Python floats. Only the operation's own tokens are
counted. So no number depends on who shares the passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Measure:
    """One part's share of a metric: a sum is `total`, a mean is `total / weight`, a max is `total`."""

    total: float
    weight: float = 1.0


def merge_measures(into: dict[str, Measure], part: Mapping[str, Measure]) -> None:
    """Add the measures of one part to `into`, which has those of the parts before."""
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


class RouteCounter:
    """Collects the chosen experts of every mixture layer of one forward (`on_route` of the decoder)."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._chosen: list[Tensor] = []

    def on_route(self, layer: int, experts_TK: Tensor) -> None:
        self._chosen.append(experts_TK)

    def counts(self, offsets: list[int]) -> list[Tensor]:
        """Tokens per expert [layers, experts] of each group of rows offsets[g]:offsets[g+1]."""
        if not self._chosen:
            return [torch.zeros(0, self._num_experts, dtype=torch.int64) for _ in offsets[1:]]
        experts_LTK = torch.stack(self._chosen).cpu()
        layers = experts_LTK.shape[0]
        flat_LTK = experts_LTK + self._num_experts * torch.arange(layers)[:, None, None]
        return [
            torch.bincount(flat_LTK[:, a:b].reshape(-1), minlength=layers * self._num_experts).view(layers, -1)
            for a, b in pairwise(offsets)
        ]


def balance_metrics(counts_LE: Tensor) -> dict[str, float]:
    """Load balance over the mixture layers, with Tinker's names. Violation of an expert: tokens / mean tokens - 1
    ("Auxiliary-Loss-Free Load Balancing", arXiv 2408.15664, whose MaxVio is `e_max_violation`). Empty if dense."""
    if counts_LE.numel() == 0 or int(counts_LE.sum()) == 0:
        return {}
    load_LE = counts_LE.double()
    violation_LE = load_LE / load_LE.mean(dim=1, keepdim=True) - 1
    most_L = violation_LE.amax(dim=1)
    return {
        "e_frac_with_tokens:mean": float((counts_LE > 0).double().mean()),
        "e_frac_oversubscribed:mean": float((violation_LE > 0).double().mean()),
        "e_max_violation:mean": float(most_L.mean()),
        "e_max_violation:max": float(most_L.max()),
        "e_min_violation:mean": float(violation_LE.amin(dim=1).mean()),
    }
