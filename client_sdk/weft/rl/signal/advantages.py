"""How good a rollout was beside the others of its group: rewards in, one advantage for each out.

Any function of this form can stand in their place. Sources: GRPO arXiv 2402.03300; Dr. GRPO arXiv 2503.20783; RLOO
arXiv 2402.14740; MaxRL and the running baseline as prime-rl computes them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from weft.rl import checks

#: Rewards of a group -> advantages, one for each.
Advantage = Callable[[Sequence[float]], list[float]]


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """s - mean, which is that of exact numbers: equal rewards give 0, and nothing that a division makes large."""
    given = [float(s) for s in rewards]  # the mean of numpy's integers would be an integer
    mean = statistics.mean(given)
    return [s - mean for s in given]


def grpo(rewards: Sequence[float], *, unbiased: bool = True, eps: float = 1e-6) -> list[float]:
    """(s - mean) / (std + eps); the unbiased std divides by G - 1. A group of one, or of equal rewards, gives 0."""
    centred = dr_grpo(rewards)
    spread = math.hypot(*centred)  # a square would overflow where no reward does
    if spread == 0:
        return [0.0] * len(centred)
    std = spread / math.sqrt(len(centred) - 1 if unbiased else len(centred))
    return [c / (std + eps) for c in centred]


def rloo(rewards: Sequence[float]) -> list[float]:
    """s - mean of the others, which is (s - mean) G / (G - 1). A group of one gives 0."""
    size = len(rewards)
    return [c * size / max(1, size - 1) for c in dr_grpo(rewards)]


def maxrl(rewards: Sequence[float]) -> list[float]:
    """(s - mean) / mean, and 0 if the mean is not positive: rare successes count most."""
    mean = statistics.mean(map(float, rewards))
    return [c / mean for c in dr_grpo(rewards)] if mean > 0 else [0.0] * len(rewards)


def reinforce(rewards: Sequence[float]) -> list[float]:
    """s itself."""
    return [float(s) for s in rewards]


class RunningBaseline:
    """s - b, where b is the running mean of the rewards before it: b <- decay b + (1 - decay) s, from 0.

    For groups of one, and for agents that play against each other (one of these for each).
    """

    def __init__(self, decay: float = 0.95) -> None:
        checks.number("decay", decay, most=1)
        if decay == 1:
            raise ValueError(f"decay must be in [0, 1), got {decay}")
        self.decay = decay
        self.baseline = 0.0

    def __call__(self, rewards: Sequence[float]) -> list[float]:
        advantages = []
        for s in rewards:
            advantages.append(s - self.baseline)
            self.baseline = self.decay * self.baseline + (1 - self.decay) * s
        return advantages

    def state_dict(self) -> dict[str, Any]:
        return {"baseline": self.baseline}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.baseline = float(state["baseline"])
