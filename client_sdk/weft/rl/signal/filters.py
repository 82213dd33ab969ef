"""What is not worth training on: a filter says of a group whether to keep it, or of a rollout.

A rejected group is paid for and shown as waste; with `Groups(refill=True)` another takes its place.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from weft.rl import checks
from weft.rl.rollout import Group, Rollout

#: True: keep it. Its `__name__` is what the count of the rejected is called.
GroupFilter = Callable[[Group], bool]
RolloutFilter = Callable[[Rollout], bool]


def not_all_equal(group: Group) -> bool:
    """Equal rewards give no advantage."""
    return len(set(group.rewards)) > 1


def not_solved_or_hopeless(group: Group) -> bool:
    """Online difficulty filtering: a mean of exactly 0 or 1 is rejected. A group of all 0.5 is kept."""
    return group.mean not in (0.0, 1.0)


def spread(least: float = 1e-6) -> GroupFilter:
    """The rewards' standard deviation is above `least` (DAPO's dynamic sampling)."""

    checks.finite("least", least)

    def spread(group: Group) -> bool:
        return len(group.rollouts) > 1 and statistics.stdev(group.rewards) > least

    return spread


def not_gibberish(vocab_size: int, rare_from: int, margin: float = 2.0) -> RolloutFilter:
    """No drawn token with an id from `rare_from` is less likely than a uniform draw by `margin` nats."""
    checks.count("vocab_size", vocab_size)
    checks.count("rare_from", rare_from, least=0)
    checks.finite("margin", margin)
    least = -math.log(vocab_size) - margin

    def not_gibberish(rollout: Rollout) -> bool:
        return not any(
            token >= rare_from and logprob < least
            for turn in rollout.turns
            for token, logprob in zip(turn.tokens, turn.logprobs, strict=True)
        )

    return not_gibberish


def not_repeating(run: int = 3000, probability: float = 0.99) -> RolloutFilter:
    """No `run` tokens in a row of a turn were drawn with more than `probability`: what loops becomes certain."""
    checks.count("run", run)
    checks.number("probability", probability, above=True, most=1)
    certain = math.log(probability)

    def not_repeating(rollout: Rollout) -> bool:
        for turn in rollout.turns:
            length = 0
            for logprob in turn.logprobs:
                length = length + 1 if logprob > certain else 0
                if length >= run:
                    return False
        return True

    return not_repeating
