"""The trainers of a simulation: one pass after the other, each what `scheduler.order.compose` takes of the runs that
live there, which `scheduler.order.homes` decides. All runs are created before anything else happens. A run that moves
is nobody's until the pass is over that its trainer computes; nor do saving and reading its state take longer here."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from scheduler.links.contract import Path
from scheduler.links.messages import OpKind
from scheduler.order.compose import compose
from scheduler.order.fair import FairTree, Only
from scheduler.order.homes import Claim, Homes
from scheduler.order.lanes import Unit
from scheduler.simulator.cluster import Cluster
from scheduler.simulator.slots import MODEL


@dataclass
class Work:
    """What trainers did: passes that had tokens, and stages of them; slices, light work (steps and saves), tokens, and
    pairs of tokens of one sequence; the time of all trainers for it; and the runs with data, of each stage.
    Of what was measured, a pass at the end of the time that counts is counted in part."""

    passes: float = 0
    stages: float = 0
    slices: float = 0
    light: float = 0
    tokens: float = 0
    pairs: float = 0
    seconds: float = 0.0
    runs: float = 0

    @classmethod
    def of_stage(cls, units: Sequence[Unit], pairs_of: Callable[[Unit], int]) -> Work:
        """The work of one stage, without its time."""
        light, tokens = sum(unit.light for unit in units), sum(unit.tokens for unit in units)
        runs = len({unit.send.run_id for unit in units if not unit.light})
        return cls(0, int(runs > 0), len(units) - light, light, tokens, sum(map(pairs_of, units)), runs=runs)

    def add(self, more: Work) -> None:
        for name, count in vars(more).items():
            setattr(self, name, getattr(self, name) + count)


def stages_of(units: Iterable[Unit]) -> list[list[Unit]]:
    """The stages in which a trainer computes a pass (`workers.trainer.trainer`): a run's units after n of its steps are
    in stage n, together with those of all other runs."""
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
    """One trainer. `stages` are those of its present pass, each with the time of its end."""

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
        self,
        cluster: Cluster,
        queue: FairTree[Unit],
        paths: Mapping[str, Path],
        pairs_of: Callable[[Unit], int],
        cost_of: Callable[[Unit], int],
        done: Callable[[Unit, float], None],
    ) -> None:
        """`paths`: the path of each run in the queue; without paths any trainer takes whatever comes next. `cost_of`:
        how many tokens a unit counts as."""
        self._cluster = cluster
        self._queue = queue
        self._pairs_of, self._cost_of, self._ended = pairs_of, cost_of, done
        self._trainers = [_Trainer(f"{number}") for number in range(cluster.trainers)]
        self._paths = paths
        self._moving: dict[str, str] = {}  # by run: the trainer that is to hand it over
        self.done = Work()
        self._shared = cluster.trainers > 1 and bool(paths)
        self._at_s = 0.0
        self._homes = Homes(cluster.pass_tokens, lambda: self._at_s)
        for trainer in self._trainers:
            self._homes.offer(trainer.name, [MODEL])
        for run, name in self._homes.place(list(map(self._claim, paths))).items():
            self._homes.settle(self._claim(run), name)

    @property
    def over_s(self) -> float:
        """The time at which the next trainer ends its stage."""
        return min(trainer.next_s for trainer in self._trainers)

    def advance(self, now_s: float) -> None:
        """Train until `now_s`, and end the stages that are over by then."""
        span, self._at_s = now_s - self._at_s, now_s
        for trainer in self._trainers:
            self.done.seconds += span * bool(trainer.stages)
            while trainer.next_s <= now_s:
                _, units = trainer.stages.popleft()
                self.done.add(Work.of_stage(units, self._pairs_of))
                self.asked(dict.fromkeys(unit.send.run_id for unit in units))
                for unit in units:
                    self._ended(unit, now_s)

    def asked(self, runs: Iterable[str]) -> None:
        """The outstanding tokens of these runs have changed."""
        if not self._shared:
            return
        in_hand = Counter[str]()
        for trainer in self._trainers:
            for unit in trainer.units:
                in_hand[unit.send.run_id] += self._cost_of(unit)
        for run in runs:
            self._homes.outstanding(run, self._queue.queued(self._paths[run]) + in_hand[run])

    def fill(self, now_s: float) -> None:
        """Begin a pass on each free trainer that there is work for."""
        free = [trainer for trainer in self._trainers if not trainer.stages]
        if not free or not self._queue.children():
            return
        over = {trainer.name for trainer in free}
        self._moving = {run: name for run, name in self._moving.items() if name not in over}
        if self._shared:
            moves = self._homes.even_out(map(self._claim, self._paths))
            busy = {trainer.name for trainer in self._trainers if trainer.stages}
            self._moving |= {move.run_id: move.source for move in moves if move.source in busy}
        for trainer in free:
            over_s = now_s
            units = compose(self._queue, [MODEL], self._cluster.pass_tokens, self._only(trainer.name))
            for stage in stages_of(units):
                work = Work.of_stage(stage, self._pairs_of)
                counts = work.stages, work.slices, work.light, work.pairs, work.runs
                over_s += self._cluster.pass_takes_s(work.tokens, *counts)
                trainer.stages.append((over_s, stage))
            self.done.passes += any(not unit.light for unit in units)

    def _only(self, name: str) -> Only | None:
        if not self._shared:
            return None
        return lambda run: run not in self._moving and self._homes.home(run) == name

    def _claim(self, run: str) -> Claim:
        return Claim(run, MODEL, fixed=run in self._moving)
