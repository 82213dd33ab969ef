"""Where runs live: on which trainer each is, where one goes that is on none, and when one had better move.

A run has a home from the first pass that it is in until its trainer is gone, or has handed it over. One that waits for
its first pass has none, so who comes meanwhile takes their share of those.

Demand of a run: the tokens that it has queued, and those it was served lately (they lose half of their weight every
HALF_LIFE_S), but no more than a whole trainer is served. A trainer's load is the demand of the runs that live there.

Placing: a run goes to a trainer that has its base model, and memory for it if any has; of these to the one with the
least load, then the fewest bytes of runs, then the one that has been there longest.

Evening out: a run moves from the fullest trainer that has one whose move pays to the emptiest that has its base model.
It pays when the larger of both loads falls by an eighth (MARGIN), or would with more runs that are each less than that,
and by PAYS times the tokens that the move counts as; of several the one that evens out most. No run moves twice within
STAY_S. So

- under constant demand moves come to an end: each lowers the larger of two loads, and raises none above it;
- under any demand a run is paused for moves once in STAY_S at most: there is no ping-pong.

Pure state with an injected clock; `scheduler.dispatch.residents` asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field

HALF_LIFE_S = 10.0
MARGIN = 1 / 8
PAYS = 4
STAY_S = 20.0
#: How often it is asked whether a run had better move, and how many do at once at most.
LOOK_S = 0.5
MOST_MOVES = 8


@dataclass(frozen=True)
class Claim:
    """What a run is to a trainer: the base model that it needs, the tokens that it has `queued`, the memory that its
    state takes, and what a move of it counts as; `fixed`: it cannot move now."""

    run_id: str
    base_model: str
    queued: int = 0
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
    """`memory_bytes` are for its runs, 0 where that is not known; `runs` live there, with their sizes."""

    models: frozenset[str] = frozenset()
    memory_bytes: int = 0
    runs: dict[str, int] = field(default_factory=dict)


class Homes:
    """`pass_tokens` are what a trainer is served at least, whatever it was lately."""

    def __init__(self, pass_tokens: int, clock: Callable[[], float]) -> None:
        self._pass_tokens, self._clock = pass_tokens, clock
        self._trainers: dict[str, _Trainer] = {}  # in the order in which they came
        self._homes: dict[str, str] = {}
        self._lately: dict[str, tuple[float, float]] = {}  # of a run: tokens, and as of when
        self._moved: dict[str, float] = {}  # when a run has moved
        self._looked = -math.inf

    def offer(self, trainer: str, models: Iterable[str], memory_bytes: int = 0) -> None:
        """A trainer is there for runs."""
        there = self._trainers.setdefault(trainer, _Trainer())
        there.models, there.memory_bytes = frozenset(models), memory_bytes

    def retire(self, trainer: str) -> None:
        """A trainer takes no more runs."""
        self.offer(trainer, ())

    def leave(self, trainer: str) -> None:
        """A trainer is gone: the runs that lived there have no home."""
        for run_id in list(self._trainers.pop(trainer, _Trainer()).runs):
            del self._homes[run_id]

    def home(self, run_id: str) -> str | None:
        return self._homes.get(run_id)

    def without(self, run_ids: Set[str]) -> Set[str]:
        """Of these runs, those that have no home."""
        return run_ids - self._homes.keys()

    def settle(self, claim: Claim, trainer: str) -> None:
        """A run lives there from now on."""
        self._unsettle(claim.run_id)
        self._homes[claim.run_id] = trainer
        self._trainers[trainer].runs[claim.run_id] = claim.size_bytes

    def forget(self, run_id: str) -> str | None:
        """A run is over; where it lived."""
        self._lately.pop(run_id, None)
        self._moved.pop(run_id, None)
        return self._unsettle(run_id)

    def served(self, run_id: str, tokens: int) -> None:
        self._lately[run_id] = (self._decayed(run_id) + tokens, self._clock())

    def place(self, waiting: Sequence[Claim], others: Sequence[Claim] = ()) -> dict[str, str]:
        """Where runs without a home would go, in their order; `others` are at home. One that nobody can serve is left
        out."""
        demands = self._demands([*waiting, *others])
        loads, used = self._loads(demands), self._used()
        found: dict[str, str] = {}
        for claim in waiting:
            able = self._able(claim)
            if not able:
                continue
            least = min(able, key=lambda name: (not self._fits(claim, name, used), loads[name], used[name]))
            loads[least] += demands[claim.run_id]
            used[least] += claim.size_bytes
            found[claim.run_id] = least
        return found

    def even_out(self, residents: Iterable[Claim]) -> list[Move]:
        """Have runs live elsewhere where that pays now, of these, which are all that are at home."""
        now = self._clock()
        if len(self._trainers) < 2 or now - self._looked < LOOK_S:
            return []
        self._looked = now
        residents = list(residents)
        demands = self._demands(residents)
        loads, used = self._loads(demands), self._used()
        rested = (c for c in residents if now - self._moved.get(c.run_id, -math.inf) >= STAY_S)
        movable = {claim.run_id: claim for claim in rested if not claim.fixed}
        moves: list[Move] = []
        while len(moves) < MOST_MOVES and (move := self._best(movable.values(), demands, loads, used)) is not None:
            claim = movable.pop(move.run_id)
            self.settle(claim, move.target)
            self._moved[claim.run_id] = now
            loads[move.source] -= demands[move.run_id]
            loads[move.target] += demands[move.run_id]
            used[move.source] -= claim.size_bytes
            used[move.target] += claim.size_bytes
            moves.append(move)
        return moves

    def _best(
        self, movable: Iterable[Claim], demands: dict[str, float], loads: dict[str, float], used: dict[str, int]
    ) -> Move | None:
        """Of the fullest trainer that has one, the run whose move lowers the larger load most."""
        at: dict[str, list[Claim]] = {}
        for claim in movable:
            at.setdefault(self._homes[claim.run_id], []).append(claim)
        for source in sorted(at, key=lambda name: -loads[name]):
            most, best = 0.0, None
            for claim in at[source]:
                able = [name for name in self._able(claim) if name != source and self._fits(claim, name, used)]
                target = min(able, key=loads.__getitem__, default=source)
                gap = loads[source] - loads[target]
                gain = min(demands[claim.run_id], gap - demands[claim.run_id])
                least = min(MARGIN * loads[source], demands[claim.run_id])
                uneven = gap >= 2 * MARGIN * loads[source]
                if uneven and gain > most and gain >= max(least, PAYS * claim.move_tokens):
                    most, best = gain, Move(claim.run_id, source, target)
            if best is not None:
                return best
        return None

    def _able(self, claim: Claim) -> list[str]:
        return [name for name, there in self._trainers.items() if claim.base_model in there.models]

    def _fits(self, claim: Claim, trainer: str, used: dict[str, int]) -> bool:
        room = self._trainers[trainer].memory_bytes
        return not room or used[trainer] + claim.size_bytes <= room

    def _used(self) -> dict[str, int]:
        return {name: sum(there.runs.values()) for name, there in self._trainers.items()}

    def _demands(self, claims: Iterable[Claim]) -> dict[str, float]:
        served = (sum(map(self._decayed, there.runs)) for there in self._trainers.values())
        most = max([self._pass_tokens, *served])  # what one trainer is served, about
        return {claim.run_id: min(most, claim.queued + self._decayed(claim.run_id)) for claim in claims}

    def _loads(self, demands: dict[str, float]) -> dict[str, float]:
        return {name: sum(demands.get(run, 0.0) for run in there.runs) for name, there in self._trainers.items()}

    def _decayed(self, run_id: str) -> float:
        tokens, at = self._lately.get(run_id, (0.0, 0.0))
        return float(tokens * 0.5 ** ((self._clock() - at) / HALF_LIFE_S))

    def _unsettle(self, run_id: str) -> str | None:
        home = self._homes.pop(run_id, None)
        if home is not None:
            del self._trainers[home].runs[run_id]
        return home
