"""Penalties for length: rewards and what each rollout took in, rewards that favour the short out; before advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.rl import checks


@dataclass(frozen=True)
class Size:
    """The size of one rollout: tokens drawn, tokens read, and turns."""

    drawn: int
    read: int = 0
    turns: int = 1

    def __post_init__(self) -> None:
        checks.number("drawn", self.drawn)
        checks.number("read", self.read)
        checks.number("turns", self.turns)


#: (rewards of a group, sizes of its rollouts) -> rewards.
Penalty = Callable[[Sequence[float], Sequence[Size]], list[float]]


def linear(drawn: float = 0.25, read: float = 0.1, turns: float = 0.1) -> Penalty:
    """s - max(0, mean(s)) (drawn d/max d + read r/max r + turns t/max t), as prime-rl's: nothing is taken where nobody
    succeeds. Rewards whose mean is negative stay as they are, where its formula would pay for length."""
    for name, value in (("drawn", drawn), ("read", read), ("turns", turns)):
        checks.finite(name, value)

    def penalty(rewards: Sequence[float], sizes: Sequence[Size]) -> list[float]:
        mean = max(0.0, sum(rewards) / len(rewards))
        most_drawn = max(1, *(size.drawn for size in sizes))
        most_read = max(1, *(size.read for size in sizes))
        most_turns = max(1, *(size.turns for size in sizes))

        def share(size: Size) -> float:
            long = drawn * size.drawn / most_drawn + read * size.read / most_read
            return long + turns * size.turns / most_turns

        return [s - mean * share(size) for s, size in zip(rewards, sizes, strict=True)]

    return penalty


def short_and_right(by: Callable[[Size], float] = lambda size: size.drawn) -> Penalty:
    """The best earn more when they are cheap: s (1 + b), b = 1 - cost / mean cost of the best, within [0, 1].

    prime-rl's penalty of May 2026."""
    checks.function("by", by, "lambda size: size.drawn")

    def penalty(rewards: Sequence[float], sizes: Sequence[Size]) -> list[float]:
        best = max(rewards)
        costs = [by(size) for s, size in zip(rewards, sizes, strict=True) if s == best]
        mean = sum(costs) / len(costs)
        if best <= 0 or mean <= 0:
            return list(rewards)
        bonus = [min(1.0, max(0.0, 1 - by(size) / mean)) for size in sizes]
        return [s * (1 + b) if s == best else s for s, b in zip(rewards, bonus, strict=True)]

    return penalty


def overlong(limit: int, tail: int) -> Penalty:
    """A penalty of 0 up to limit - tail drawn tokens, which then falls to -1 at the limit (DAPO, arXiv 2503.14476)."""
    checks.count("limit", limit)
    checks.count("tail", tail)
    if tail > limit:
        raise ValueError(f"tail must be within 1 and the limit of {limit}, got {tail}")

    def penalty(rewards: Sequence[float], sizes: Sequence[Size]) -> list[float]:
        over = [min(1.0, max(0.0, (size.drawn - (limit - tail)) / tail)) for size in sizes]
        return [s - o for s, o in zip(rewards, over, strict=True)]

    return penalty
