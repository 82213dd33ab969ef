"""The trainers of a simulation: one pass after the other, each what `scheduler.order.compose` takes of the runs that
live there, which `scheduler.order.homes` decides. A move is over at once."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    """What trainers did: passes that had tokens, and stages of them; slices, light work (steps and saves) and
    tokens; and the time that all of it took them together."""

    passes: int = 0
    stages: int = 0
    slices: int = 0
    light: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @classmethod
    def of_stage(cls, units: Sequence[Unit]) -> Work:
        """Of one stage, without its time."""
        light, tokens = sum(unit.light for unit in units), sum(unit.tokens for unit in units)
        return cls(0, int(light < len(units)), len(units) - light, light, tokens)

    def add(self, more: Work) -> None:
        self.passes += more.passes
        self.stages += more.stages
        self.slices += more.slices
        self.light += more.light
        self.tokens += more.tokens
        self.seconds += more.seconds


def stages_of(units: Iterable[Unit]) -> list[list[Unit]]:
    """As a trainer computes a pass (`workers.trainer.trainer`): what a run has behind a step in a stage of its own,
    with what all other runs have behind as many."""
    stages, steps = list[list[Unit]](), Counter[str]()
    for unit in units:
        run = unit.send.run_id
        if steps[run] == len(stages):
            stages.append([])
        stages[steps[run]].append(unit)
        steps[run] += unit.send.kind is OpKind.OPTIM_STEP
    return stages


@dataclass
class _Trainer:
    """`stages` of the pass that it computes, each with the time at which it is over."""

    name: str
    stages: deque[tuple[float, list[Unit]]] = field(default_factory=deque)

    @property
    def units(self) -> Iterator[Unit]:
        return (unit for _, units in self.stages for unit in units)

    @property
    def next_s(self) -> float:
        return self.stages[0][0] if self.stages else float("inf")


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
        """When the next stage is over."""
        return min(trainer.next_s for trainer in self._trainers)

    def advance(self, now_s: float) -> None:
        """Train until `now_s`, and end the stages that are over."""
        span, self._at_s = now_s - self._at_s, now_s
        for trainer in self._trainers:
            self.done.seconds += span * bool(trainer.stages)
            while trainer.next_s <= now_s:
                _, units = trainer.stages.popleft()
                self.done.add(Work.of_stage(units))
                for unit in units:
                    self._ended(unit, now_s)

    def fill(self, now_s: float) -> None:
        """Begin a pass wherever a trainer is free and there is work for it."""
        free = [trainer for trainer in self._trainers if not trainer.stages]
        if not free or not self._queue.children():
            return
        if len(self._trainers) > 1:
            self._homes.even_out(map(self._claim, self._at_home))
        for trainer in free:
            over_s = now_s
            units = compose(self._queue, [MODEL], self._cluster.pass_tokens, self._only(trainer.name))
            for stage in stages_of(units):
                work = Work.of_stage(stage)
                over_s += self._cluster.pass_takes_s(work.tokens, work.stages, work.slices, work.light)
                trainer.stages.append((over_s, stage))
            if units:
                self.done.passes += any(not unit.light for unit in units)
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
