"""Whether a worker with a base model is present or coming, for those who wait for one.

Between "it is next" and "nobody will ever come" lie minutes in which a worker reads its weights and takes no work. So a
worker that loads is known before it is there: in the embedded service to the supervisor that has started it, over Redis
by `scheduler.links.loading`. What has neither been there nor loaded for GRACE_S is missing.

Pure state with an injected clock; each desk has one, and each replica.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from scheduler.order.operations import Waiting

#: How long no worker need be present or load: after the start of a server, and between the end of a worker and its
#: restart.
GRACE_S = 30.0

#: For how long a worker of some role has been loading a base model; None if none does.
LoadingFor = Callable[[str], float | None]


def nobody_loads(base_model: str) -> None:
    return None


@dataclass(frozen=True)
class Present:
    """The workers of one role: whether any is `here`, and any that `serves` the base model in question; for how long
    one has been loading it, and for how long none has had it."""

    here: bool = False
    serves: bool = False
    loading_s: float | None = None
    missing_s: float = 0.0


class Presence:
    """For each base model: when a worker of one role was last seen to have it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.forget()

    def forget(self) -> None:
        """Nobody was looking: the grace period begins anew."""
        self._began, self._seen = self._clock(), dict[str, float]()

    def saw(self, models: Iterable[str]) -> None:
        self._seen.update(dict.fromkeys(models, self._clock()))

    def missing_s(self, base_model: str) -> float:
        return self._clock() - self._seen.get(base_model, self._began)


def queued_for(worker: str, ahead: int, base_model: str, present: Present) -> Waiting:
    """What is told to a client whose operation of `base_model` is queued behind `ahead` others for a `worker`."""
    place = f"about {ahead} pieces of work are ahead of it in fair order" if ahead else "it is next"
    if present.serves:
        return Waiting("active", f"waiting for the {worker}, which is busy; {place}")
    missing = present.loading_s is None and present.missing_s > GRACE_S
    if present.loading_s is not None:
        reason = f"waiting for the {worker}, which is starting: it has been loading {base_model} for "
        reason += f"{present.loading_s:.0f} s; {place}"
    elif not (present.here or missing):
        reason = f"waiting for the {worker}, which is starting; {place}"
    else:
        reason = f"no {worker} here has its base model {base_model}: it waits until one has"
    if missing:
        reason += f". None has had it, or was loading it, for {present.missing_s:.0f} s: ask the operator for one"
    return Waiting("paused_capacity", reason, unserved=missing)
