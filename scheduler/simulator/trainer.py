"""The trainer of a simulation: one pass after the other, each what `scheduler.order.compose` takes."""

from __future__ import annotations

from collections.abc import Callable

from scheduler.order.compose import compose
from scheduler.order.fair import FairTree
from scheduler.order.lanes import Unit
from scheduler.simulator.cluster import Cluster


class Trainer:
    def __init__(self, cluster: Cluster, queue: FairTree[Unit], done: Callable[[Unit, float], None]) -> None:
        self._cluster = cluster
        self._queue = queue
        self._done = done
        self._units: list[Unit] = []
        self.over_s = float("inf")
        self.busy_s = 0.0
        self._at_s = 0.0

    def advance(self, now_s: float) -> None:
        """Train until `now_s`, and end the pass that is over."""
        self.busy_s += (now_s - self._at_s) * bool(self._units)
        self._at_s = now_s
        if now_s >= self.over_s:
            units, self._units = self._units, []
            self.over_s = float("inf")
            for unit in units:
                self._done(unit, now_s)

    def fill(self, now_s: float) -> None:
        """Begin a pass, if the trainer is free and there is work."""
        model = next(iter(self._queue.children()), None)
        if self._units or model is None:
            return
        self._units = compose(self._queue, [model], self._cluster.pass_tokens)
        tokens = sum(unit.tokens for unit in self._units)
        self.over_s = now_s + self._cluster.pass_takes_s(tokens)
