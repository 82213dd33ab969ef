"""Where runs live: on which trainer each is, where one goes that is on none, and when one had better move.

A run has a home from the first pass that it is in until its trainer is gone, or has handed it over. One that waits for
its first pass has none, so who comes meanwhile takes their share of those.

Demand of a run: the tokens that it has outstanding (queued, or in a trainer's hands), never more than a pass, on
average over time: what was loses half of its weight every HALF_LIFE_S. By Little's law that is what it asks for in a
second times the seconds until it is answered. So a client that always waits for an answer counts what it keeps in
flight, however many it shares the trainer with; one that mostly thinks counts little; a flood counts one pass. A new
run counts as if it had had an eighth of a pass (GUESS) outstanding for GUESSED_S, so that runs that come together part.
A trainer's load is the demand of the runs that live there: about what each of them waits for.

Placing: a run goes to a trainer that has its base model, and memory for it if any has; of these to the one with the
least load, then the fewest bytes of runs, then the one that has been there longest.

Evening out: a run moves from the fullest trainer that has one whose move pays to the emptiest that has its base model.
It pays when the larger of both loads falls by a sixteenth (MARGIN), or would with more runs that are each less than
that, and in PAID_PASSES passes by the tokens that the move counts as; of several the one that evens out most. Where no
move pays, an exchange of two runs may. No run moves twice within STAY_S. So

- under constant demand moves come to an end: each lowers the larger of two loads, and raises none above it;
- of equal runs, up to sixteen on a trainer, no trainer then has two more than another;
- under any demand a run is paused for moves once in STAY_S at most: there is no ping-pong.

Pure state with an injected clock; `scheduler.dispatch.residents` asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field

HALF_LIFE_S = 10.0
GUESS = 1 / 8
GUESSED_S = 1.0
MARGIN = 1 / 16
PAID_PASSES = 8
STAY_S = 20.0
#: How often runs are checked for moves, and how many may move at once.
LOOK_S = 0.5
MOST_MOVES = 8


@dataclass(frozen=True)
class Claim:
    """What a trainer must know of a run: the base model that it needs, the memory of its state, and how many tokens a
    move of it counts as. `fixed`: it cannot move now."""

    run_id: str
    base_model: str
    size_bytes: int = 0
    move_tokens: int = 0
    fixed: bool = False


@dataclass(frozen=True)
class Move:
    run_id: str
    source: str
    target: str


@dataclass
class _Trainer:
    """`memory_bytes`: room for its runs, 0 if unknown; `runs`: those that live there, with their sizes."""

    models: frozenset[str] = frozenset()
    memory_bytes: int = 0
    runs: dict[str, int] = field(default_factory=dict)


@dataclass
class _Demand:
    """A running mean of outstanding tokens. `average` is the mean until `at_s`, since when they have been `level`;
    `weight` is that of the past, and grows to 1."""

    at_s: float
    average: float
    level: float = 0.0
    weight: float = 1 - 0.5 ** (GUESSED_S / HALF_LIFE_S)

    def advance(self, now_s: float) -> float:
        """Bring the mean up to now, and return it."""
        kept = 0.5 ** ((now_s - self.at_s) / HALF_LIFE_S)
        old, self.weight, self.at_s = self.weight * kept, self.weight * kept + 1 - kept, now_s
        self.average += (self.level - self.average) * (1 - old / self.weight)
        return self.average


@dataclass(frozen=True)
class _Change:
    """A possible change: a run goes to `target`, and, for an exchange, run `back` comes from there. The larger load
    falls by `gain`."""

    claim: Claim
    target: str
    back: Claim | None
    gain: float


class Homes:
    """`pass_tokens`: how many tokens a trainer takes in one pass."""

    def __init__(self, pass_tokens: int, clock: Callable[[], float]) -> None:
        self._pass_tokens, self._guess, self._clock = pass_tokens, GUESS * pass_tokens, clock
        self._trainers: dict[str, _Trainer] = {}  # in the order in which they came
        self._homes: dict[str, str] = {}
        self._demands: dict[str, _Demand] = {}
        self._moved: dict[str, float] = {}  # by run: when it last moved
        self._looked = -math.inf

    def offer(self, trainer: str, models: Iterable[str], memory_bytes: int = 0) -> None:
        """A trainer takes runs of these models."""
        there = self._trainers.setdefault(trainer, _Trainer())
        there.models, there.memory_bytes = frozenset(models), memory_bytes

    def retire(self, trainer: str) -> None:
        """Give a trainer no more runs; the ones that live there stay."""
        self.offer(trainer, ())

    def leave(self, trainer: str) -> None:
        """Forget a trainer that is gone: its runs have no home any more."""
        for run_id in list(self._trainers.pop(trainer, _Trainer()).runs):
            del self._homes[run_id]

    def home(self, run_id: str) -> str | None:
        return self._homes.get(run_id)

    def without(self, run_ids: Set[str]) -> Set[str]:
        """The runs among these that have no home."""
        return run_ids - self._homes.keys()

    def settle(self, claim: Claim, trainer: str) -> None:
        """The run lives on this trainer from now on."""
        self._unsettle(claim.run_id)
        self._homes[claim.run_id] = trainer
        self._trainers[trainer].runs[claim.run_id] = claim.size_bytes

    def forget(self, run_id: str) -> str | None:
        """Forget a run that is over. Returns the trainer on which it lived."""
        self._demands.pop(run_id, None)
        self._moved.pop(run_id, None)
        return self._unsettle(run_id)

    def outstanding(self, run_id: str, tokens: int) -> None:
        """From now on so many tokens of the run are queued or in a trainer's hands."""
        now = self._clock()
        demand = self._demands.setdefault(run_id, _Demand(now, self._guess))
        demand.advance(now)
        demand.level = min(tokens, self._pass_tokens)

    def demand(self, run_id: str) -> float:
        """The run's demand, in tokens."""
        demand = self._demands.get(run_id)
        return demand.advance(self._clock()) if demand is not None else self._guess

    def place(self, waiting: Sequence[Claim]) -> dict[str, str]:
        """The trainers to which these runs without a home would go, one after the other. A run that no trainer can
        serve is left out."""
        loads, used = self._loads(), self._used()
        found: dict[str, str] = {}
        for claim in waiting:
            able = self._able(claim)
            if not able:
                continue
            least = min(able, key=lambda name: (not self._fits(claim, name, used), loads[name], used[name]))
            loads[least] += self.demand(claim.run_id)
            used[least] += claim.size_bytes
            found[claim.run_id] = least
        return found

    def even_out(self, residents: Iterable[Claim]) -> list[Move]:
        """Move runs where that pays now. `residents` are all runs that have a home."""
        now = self._clock()
        if len(self._trainers) < 2 or now - self._looked < LOOK_S:
            return []
        self._looked = now
        rested = (c for c in residents if now - self._moved.get(c.run_id, -math.inf) >= STAY_S)
        movable = {claim.run_id: claim for claim in rested if not claim.fixed}
        moves: list[Move] = []
        while len(moves) < MOST_MOVES and (change := self._best(movable.values())) is not None:
            source = self._homes[change.claim.run_id]
            for claim, old, new in ((change.claim, source, change.target), (change.back, change.target, source)):
                if claim is not None:
                    del movable[claim.run_id]
                    self.settle(claim, new)
                    self._moved[claim.run_id] = now
                    moves.append(Move(claim.run_id, old, new))
        return moves

    def _best(self, movable: Iterable[Claim]) -> _Change | None:
        """The best change of the fullest trainer that has one: the move, or else the exchange, that lowers the larger
        load most."""
        at: dict[str, list[Claim]] = {}
        for claim in movable:
            at.setdefault(self._homes[claim.run_id], []).append(claim)
        loads, used = self._loads(), self._used()
        for source in sorted(at, key=lambda name: -loads[name]):
            for found in (self._moves(source, at, loads, used), self._exchanges(source, at, loads, used)):
                best = max(found, key=lambda change: change.gain, default=None)
                if best is not None:
                    return best
        return None

    def _moves(
        self, source: str, at: dict[str, list[Claim]], loads: dict[str, float], used: dict[str, int]
    ) -> Iterator[_Change]:
        for claim in at[source]:
            able = [name for name in self._able(claim) if name != source and self._fits(claim, name, used)]
            target, demand = min(able, key=loads.__getitem__, default=source), self.demand(claim.run_id)
            gap = loads[source] - loads[target]
            gain = min(demand, gap - demand)
            uneven = gap >= 2 * MARGIN * loads[source]
            if uneven and gain > 0 and gain >= max(min(MARGIN * loads[source], demand), _paid(claim)):
                yield _Change(claim, target, None, gain)

    def _exchanges(
        self, source: str, at: dict[str, list[Claim]], loads: dict[str, float], used: dict[str, int]
    ) -> Iterator[_Change]:
        """Possible exchanges with the emptiest trainer."""
        target = min(at, key=loads.__getitem__)
        gap, least = loads[source] - loads[target], MARGIN * loads[source]
        if gap < 2 * least:
            return
        demands = {claim.run_id: self.demand(claim.run_id) for claim in (*at[source], *at[target])}
        for claim in at[source]:
            if demands[claim.run_id] < least:
                continue  # too small to lower the load by `least`; most runs are
            for back in at[target]:
                net = demands[claim.run_id] - demands[back.run_id]
                gain = min(net, gap - net)
                pays = gain > 0 and gain >= max(least, _paid(claim) + _paid(back))
                if pays and self._may_change(claim, source, back, target, used):
                    yield _Change(claim, target, back, gain)

    def _may_change(self, claim: Claim, source: str, back: Claim, target: str, used: dict[str, int]) -> bool:
        more = claim.size_bytes - back.size_bytes  # growth at the target
        fit = self._has_room(target, used[target] + more) and self._has_room(source, used[source] - more)
        return fit and target in self._able(claim) and source in self._able(back)

    def _able(self, claim: Claim) -> list[str]:
        return [name for name, there in self._trainers.items() if claim.base_model in there.models]

    def _fits(self, claim: Claim, trainer: str, used: dict[str, int]) -> bool:
        return self._has_room(trainer, used[trainer] + claim.size_bytes)

    def _has_room(self, trainer: str, size_bytes: int) -> bool:
        room = self._trainers[trainer].memory_bytes
        return not room or size_bytes <= room

    def _used(self) -> dict[str, int]:
        return {name: sum(there.runs.values()) for name, there in self._trainers.items()}

    def _loads(self) -> dict[str, float]:
        return {name: sum(map(self.demand, there.runs)) for name, there in self._trainers.items()}

    def _unsettle(self, run_id: str) -> str | None:
        home = self._homes.pop(run_id, None)
        if home is not None:
            del self._trainers[home].runs[run_id]
        return home


def _paid(claim: Claim) -> float:
    """The number of tokens by which the larger load must fall for a move to pay."""
    return claim.move_tokens / PAID_PASSES
