"""What is wrong with a requested run, with a step of its optimizer, or with a save of it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from weft.wire.base import MAX_SEED, MIN_SEED, SEEDS
from weft.wire.checks.problem import Problem, bounds
from weft.wire.shown import quote
from weft.wire.training import AdamParams
from weft.wire.weights import NAME_PATTERN

ADAMW, DIMUON = "adamw", "dimuon"

#: The smallest eps of Adam. A gradient whose square underflows to 0 in float32 would, with a smaller eps, move its
#: weight by gradient / eps: many times the learning rate.
LEAST_EPS = 1e-20
#: The largest learning rate. Weights move by about the learning rate; beyond it, the product of two LoRA factors
#: overflows float32.
MOST_RATE = 1e18
#: The largest product of learning rate and weight decay: the part that one step takes off every weight.
MOST_DECAY = 2.0

_NOT_TAKEN = "no step was taken: "
_WITHOUT = {
    "forward_backward": "a forward_backward before it failed, so its gradient is missing. Repeat what failed, and the "
    "step; all other gradients since the last step are there",
    "load_state": "a load_state before it failed, so the run has its weights of before. Load others, or repeat the "
    "step",
    "never_came": "an operation before it never arrived, and a gradient may be missing with it. Repeat what is "
    "missing, and the step; all other gradients since the last step are there",
}

_USE = {ADAMW: "step it with adam_params", DIMUON: "step it with optimizer_params of the type dimuon"}


def shape_problems(rank: int, seed: int | None, max_rank: int | None) -> Iterator[Problem]:
    """Rank and seed of an adapter."""
    if rank < 1 or (max_rank is not None and rank > max_rank):
        limit = bounds(1, max_rank)
        yield Problem("rank", f"must be {limit}, got {rank}", limit, rank)
    if seed is not None and not MIN_SEED <= seed <= MAX_SEED:
        yield Problem("seed", f"{SEEDS} (got {seed})", f"{MIN_SEED} to {MAX_SEED}", seed)


def optimizer_problems(family: object, known: Collection[str]) -> Iterator[Problem]:
    """An optimizer that the server does not have."""
    if family not in list(known):  # compared, not hashed: JSON may hold a list
        names = ", ".join(known)
        what = f"the optimizer {quote(family)} is not supported; this server has {names}"
        yield Problem("optimizer", what, names, family)


def step_problems(given: str, optimizer: str) -> Iterator[Problem]:
    """A step must be for the run's own optimizer; `given` is the optimizer whose parameters the step has."""
    if given != optimizer:
        use = f"; {_USE[optimizer]}" if optimizer in _USE else ""
        what = f"this model's optimizer is {optimizer}, set when it was created{use}"
        yield Problem("", what, optimizer, given)


def step_not_taken(kind: str, why: str) -> str:
    """The error of a step that depends on a failed operation of this `kind`; `why` is that operation's error."""
    return f"{_NOT_TAKEN}{_WITHOUT[kind]}. It failed because of this: {why}"


def is_not_taken(told: str) -> bool:
    """True if the error of a step says that the step was not taken (`step_not_taken`)."""
    return told.startswith(_NOT_TAKEN)


def adam_problems(params: AdamParams) -> Iterator[Problem]:
    """Problems that the type alone does not exclude."""
    if params.eps < LEAST_EPS:
        limit = f"at least {LEAST_EPS:.3g}"
        what = f"must be {limit}, since squares of gradients below it are 0 in float32, got {params.eps}"
        yield Problem("eps", what, limit, params.eps)
    yield from rate_problems("learning_rate", params.learning_rate)
    yield from rate_problems("weight_decay", params.weight_decay)
    if params.weight_decay <= MOST_RATE and params.learning_rate * params.weight_decay > MOST_DECAY:
        limit = f"at most {MOST_DECAY:g} / learning_rate"
        what = f"must be {limit}, beyond which weights grow with every step until they are infinite"
        yield Problem("weight_decay", f"{what}, got {params.weight_decay}", limit, params.weight_decay)


def rate_problems(name: str, rate: float) -> Iterator[Problem]:
    """Problems of a learning rate so large that the run's weights become useless after the step."""
    if rate > MOST_RATE:
        limit = f"at most {MOST_RATE:g}"
        yield Problem(name, f"must be {limit}, beyond which weights have no products, got {rate}", limit, rate)


def ttl_problems(ttl_seconds: int | None, least: int | None, most: int | None) -> Iterator[Problem]:
    """How long something may be kept."""
    if ttl_seconds is None or ((least is None or ttl_seconds >= least) and (most is None or ttl_seconds <= most)):
        return
    limit = bounds(least, most)
    yield Problem("ttl_seconds", f"must be {limit} seconds, or null for ever; got {ttl_seconds}", limit, ttl_seconds)


def name_problems(name: str) -> Iterator[Problem]:
    """The name of a checkpoint. Dots alone are refused because clients take them out of URLs."""
    if len(name) > 256 or re.fullmatch(NAME_PATTERN, name) is None:
        rule = "1 to 256 characters of A-Z a-z 0-9 . _ - (and not only dots)"
        yield Problem("name", f"{quote(name)} must be {rule}", rule, name)
