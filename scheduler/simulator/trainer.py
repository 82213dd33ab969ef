"""The trainers of a simulation: one pass after the other, each what `scheduler.order.compose` takes of the runs that
live there, which `scheduler.order.homes` decides. A move is over at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from scheduler.links.contract import Path
from scheduler.links.messages import OpKind
from scheduler.order.compose import compose, lanes
from scheduler.order.fair import FairTree, Only
from scheduler.order.homes import Claim, Homes
from scheduler.order.lanes import Unit
from scheduler.simulator.cluster import Cluster
from scheduler.simulator.slots import MODEL


@dataclass
class Work:
    """What trainers did: passes that had tokens, and stages of them that had; slices, light work (steps and saves) and
    tokens; and the time that all of it took them together."""

    passes: int = 0
    stages: int = 0
    slices: int = 0
    light: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, units: Sequence[Unit]) -> Work:
        """Of one pass, without its time."""
        light, tokens = sum(unit.light for unit in units), sum(unit.tokens for unit in units)
        return cls(int(tokens > 0), stages_of(units), len(units) - light, light, tokens)

    def add(self, more: Work) -> None:
        self.passes += more.passes
        self.stages += more.stages
        self.slices += more.slices
        self.light += more.light
        self.tokens += more.tokens
        self.seconds += more.seconds


def stages_of(units: Iterable[Unit]) -> int:
    """In how many stages a trainer computes these (`workers.trainer.trainer`): a run's data behind one of its steps in
    a stage of their own, with all other runs' behind as many."""
    steps, stages = Counter[str](), set[int]()
    for unit in units:
        if not unit.light:
            stages.add(steps[unit.send.run_id])
        steps[unit.send.run_id] += unit.send.kind is OpKind.OPTIM_STEP
    return len(stages)


@dataclass
class _Trainer:
    """`units` of the pass that is over at `over_s`."""

    name: str
    units: list[Unit] = field(default_factory=list)
    over_s: float = float("inf")


class Trainers:
    def __init__(
        self, cluster: Cluster, queue: FairTree[Unit], paths: Mapping[str, Path], done: Callable[[Unit, float], None]
    ) -> None:
        """`paths` are the places of runs in the queue; of runs without one any trainer takes what is next."""
        self._cluster = cluster
        self._queue = queue
        self._ended = done
        self._trainers = [_Trainer(f"{number}") for number in range(cluster.trainers)]
        self._homes = Homes(cluster.pass_tokens, lambda: self._at_s)
        for trainer in self._trainers:
            self._homes.offer(trainer.name, [MODEL])
        self._paths = paths
        self._at_home: dict[str, None] = {}
        self.done = Work()
        self._at_s = 0.0

    @property
    def over_s(self) -> float:
        """When the next pass is over."""
        return min(trainer.over_s for trainer in self._trainers)

    def advance(self, now_s: float) -> None:
        """Train until `now_s`, and end the passes that are over."""
        span, self._at_s = now_s - self._at_s, now_s
        for trainer in self._trainers:
            self.done.seconds += span * bool(trainer.units)
            if now_s >= trainer.over_s:
                units, trainer.units = trainer.units, []
                trainer.over_s = float("inf")
                self.done.add(Work.of(units))
                for unit in units:
                    self._ended(unit, now_s)

    def fill(self, now_s: float) -> None:
        """Begin a pass wherever a trainer is free and there is work for it."""
        free = [trainer for trainer in self._trainers if not trainer.units]
        if not free or not self._queue.children():
            return
        if len(self._trainers) > 1:
            self._homes.even_out(map(self._claim, self._at_home))
        for trainer in free:
            trainer.units = compose(self._queue, [MODEL], self._cluster.pass_tokens, self._only(trainer.name))
            if trainer.units:
                work = Work.of(trainer.units)
                trainer.over_s = now_s + self._cluster.pass_takes_s(work.tokens, work.stages, work.slices, work.light)
                self._taken(trainer)

    def _only(self, name: str) -> Only | None:
        if len(self._trainers) == 1 or not self._paths:
            return None
        waiting = [path[-1] for path in lanes(self._queue, MODEL) if self._homes.home(path[-1]) is None]
        others = map(self._claim, self._at_home if waiting else ())
        places = self._homes.place(list(map(self._claim, waiting)), list(others))
        return lambda run: (self._homes.home(run) or places.get(run)) == name

    def _taken(self, trainer: _Trainer) -> None:
        if len(self._trainers) == 1 or not self._paths:
            return
        for unit in trainer.units:
            run = unit.send.run_id
            if self._homes.home(run) != trainer.name:
                self._at_home[run] = None
                self._homes.settle(self._claim(run), trainer.name)
            self._homes.served(run, unit.tokens)

    def _claim(self, run: str) -> Claim:
        under_way = any(unit.send.run_id == run for trainer in self._trainers for unit in trainer.units)
        return Claim(run, MODEL, self._queue.queued(self._paths[run]), fixed=under_way)
