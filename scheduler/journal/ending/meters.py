"""Counters and histograms of this process, for the operator's monitoring: by kind of operation, never by tenant."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import datetime

from scheduler.order.operations import Operation

#: Upper bounds of the histograms, in seconds.
BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


@dataclass
class Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total += seconds


@dataclass
class Meters:
    submitted: Counter[str] = field(default_factory=Counter)
    ended: Counter[tuple[str, str]] = field(default_factory=Counter)  # kind, done | failed
    queue: defaultdict[str, Histogram] = field(default_factory=lambda: defaultdict(Histogram))
    execution: defaultdict[str, Histogram] = field(default_factory=lambda: defaultdict(Histogram))
    settling: Histogram = field(default_factory=Histogram)
    # operations refused by a limit on money, by the limit's scope
    denied: Counter[str] = field(default_factory=Counter)
    rate_limited: Counter[str] = field(default_factory=Counter)  # requests told to wait, by the limit
    webhook_duplicates: int = 0

    def accepted(self, op: Operation) -> None:
        self.submitted[str(op.kind)] += 1

    def closed(self, op: Operation, now: datetime) -> None:
        """Count `op`, which has its outcome."""
        kind, stretches = str(op.kind), op.timings.stretches
        self.ended[kind, "failed" if op.outcome is None or op.outcome.error is not None else "done"] += 1
        if stretches:
            waited = (stretches[0].start - op.accepted_at).total_seconds()
            worked = sum((s.end - s.start).total_seconds() for s in stretches if s.end is not None)
            self.queue[kind].observe(max(0.0, waited))
            self.execution[kind].observe(max(0.0, worked))
        if op.timings.computed is not None:
            self.settling.observe(max(0.0, (now - op.timings.computed).total_seconds()))
