"""What work without tokens weighs in the fair order, in tokens: steps, saves, loads and creates.

Their time grows with the parameters of the run's adapter, a token's with the parameters of the base model that it is
multiplied with. So a kind of work is a fixed part, and a slope on the ratio of the two; an optimizer that multiplies
matrices also grows with the rank. The numbers are of `bench/light_work.py` on two CPU cores
(`bench/results/light_work.json`), rounded up. On a GPU, where memory is fast beside arithmetic in other proportions,
they are no more than a guess of the right kind: what counts is that nobody's work is free.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.links.messages import OpKind, RunSpec, TrainOp
from scheduler.order.lanes import Unit


@dataclass(frozen=True)
class Sizes:
    """Parameters of a run's adapter, and those of its base model that one token is multiplied with."""

    adapter: int
    base: int


#: The sizes of a run; None if they are not known, and then only the fixed part counts.
SizesOf = Callable[[RunSpec], Sizes | None]


def unknown_sizes(_spec: RunSpec) -> Sizes | None:
    return None


@dataclass(frozen=True)
class Weight:
    """tokens = fixed + (slope + turn x rank) x adapter / base."""

    fixed: int
    slope: float
    turn: float = 0.0

    def tokens(self, rank: int, sizes: Sizes | None) -> int:
        ratio = sizes.adapter / sizes.base if sizes is not None else 0.0
        return math.ceil(self.fixed + (self.slope + self.turn * rank) * ratio)


STEPS = {"adamw": Weight(4, 7.0), "dimuon": Weight(23, 29.0, 3.6)}
WEIGHTS = {
    OpKind.SAVE_SAMPLER: Weight(25, 34.0),
    OpKind.SAVE_EXTERNAL: Weight(27, 85.0),
    OpKind.SAVE_STATE: Weight(15, 111.0),
    OpKind.LOAD_STATE: Weight(25, 199.0),
    OpKind.CREATE: Weight(7, 19.0),
}
#: A create from saved weights.
CREATE_FROM = Weight(14, 240.0)


def cost_of(unit: Unit, spec: RunSpec, sizes: Sizes | None) -> int:
    """How many tokens `unit`, of the run `spec`, counts as."""
    return _weight(unit.send, spec.optimizer).tokens(spec.rank, sizes) if unit.light else unit.tokens


def move_cost(spec: RunSpec, sizes: Sizes | None) -> int:
    """How many tokens the move of a run to another trainer counts as: its state is saved and read."""
    return sum(weight.tokens(spec.rank, sizes) for weight in (WEIGHTS[OpKind.SAVE_STATE], CREATE_FROM))


def _weight(op: TrainOp, optimizer: str) -> Weight:
    if op.kind is OpKind.OPTIM_STEP:
        return STEPS[optimizer]
    return CREATE_FROM if op.kind is OpKind.CREATE and op.source_ref else WEIGHTS[op.kind]
