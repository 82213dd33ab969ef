"""Learning rates by step."""

from __future__ import annotations

import math
from collections.abc import Callable

from weft.rl.checks import count, finite
from weft.wire.shown import arguments
from weft.wire.training import AdamParams

#: The number of a step, from 0 -> its learning rate.
Rate = Callable[[int], float]


def constant(rate: float) -> Rate:
    finite("rate", rate)
    return lambda step: rate


def linear(peak: float, steps: int, warmup: int = 0) -> Rate:
    """Up to `peak` in `warmup` steps, then down to 0 at `steps`."""
    _planned(peak, steps, warmup)

    def at(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        return peak * max(0, steps - step) / max(1, steps - warmup)

    return at


def cosine(peak: float, steps: int, warmup: int = 0, floor: float = 0.0) -> Rate:
    """Up to `peak` in `warmup` steps, then down to `floor` at `steps` along half a cosine."""
    _planned(peak, steps, warmup)
    finite("floor", floor)

    def at(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        left = max(0, steps - step) / max(1, steps - warmup)
        return floor + (peak - floor) * (1 - math.cos(math.pi * left)) / 2

    return at


def _planned(peak: float, steps: int, warmup: int) -> None:
    finite("peak", peak)
    count("steps", steps)
    count("warmup", warmup, least=0)


def rate_of(given: float | Rate) -> Rate:
    return given if callable(given) else constant(float(given))


def params_of(optim: AdamParams, rate: float | Rate, step: int) -> AdamParams:
    """The optimizer's parameters at `step`. Call it before the step's gradient is sent: it raises ValueError for a rate
    that the server would refuse, and an unused gradient would be added to the next step's."""
    with arguments():
        return type(optim)(**{**dict(optim), "learning_rate": rate_of(rate)(step)})
