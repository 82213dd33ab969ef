"""When groups start and which of them make a batch: what a user chooses. `pacer.py` carries it out.

One rule for all: **a token may be at most `max_lag` optimizer steps old when it is trained.** Its age is the policy
version that is trained less the oldest version that drew any token of its group; a batch in training counts as trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from weft.rl import checks

#: Which tokens make a batch of `Partial`.
Budget = Literal["completed", "generated"]


@dataclass(frozen=True)
class Sync:
    """On-policy: a batch is sampled, then trained, then the next. Nothing is sampled meanwhile.

    With `oversample` 1.5, half as many groups again are started, the first that end are trained, the rest is cancelled,
    and paid for: it hides stragglers, and favours what is quick.
    """

    oversample: float = 1.0

    def __post_init__(self) -> None:
        checks.finite("oversample", self.oversample, least=1)

    @property
    def max_lag(self) -> int:
        return 0

    @property
    def inflight(self) -> bool:
        return False


@dataclass(frozen=True)
class Async:
    """Sampling goes on while training does; a group that would be older than `max_lag` is cancelled.

    `inflight` moves rollouts that are under way to the newest weights, between two tokens; else each keeps the weights
    that it began with.
    """

    max_lag: int = 1
    inflight: bool = True

    def __post_init__(self) -> None:
        if self.max_lag == 0:
            raise ValueError("max_lag must be at least 1, got 0; Sync() is on-policy")
        checks.count("max_lag", self.max_lag)
        checks.flag("inflight", self.inflight)


@dataclass(frozen=True)
class Partial:
    """Batches by tokens, not groups, with rollouts carried over (C3PO++, Ring-1T's report, section 2.3.3).

    `in_flight` groups are under way at any time. A batch is trained as soon as it has `tokens`: those of groups that
    are complete, or with budget="generated" also those drawn so far of the others (the report says both). What is not
    complete goes on with the new weights, at most `retention` times; then it is purged.
    """

    tokens: int
    in_flight: int
    retention: int = 2
    budget: Budget = "completed"

    def __post_init__(self) -> None:
        for name in ("tokens", "in_flight", "retention"):
            checks.count(name, getattr(self, name))
        checks.one_of("budget", self.budget, get_args(Budget))

    @property
    def max_lag(self) -> int:
        return self.retention

    @property
    def inflight(self) -> bool:
        return True


Schedule = Sync | Async | Partial
