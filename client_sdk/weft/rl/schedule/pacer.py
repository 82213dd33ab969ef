"""The schedule as a pure state machine: events in, decisions out; no clock, no I/O.

    start -> progress... -> finish | drop        take -> (the batch is trained) -> stepped

`due` is the version at which a group that is not in training would be trained at the earliest: the present one, or one
more while a batch is in training. A group whose oldest token would then be older than `max_lag` is late: it is never
trained, so it is cancelled as soon as that is known. To throw little away, what is under way, ready and in training is
kept within max_lag + 1 batches (AReaL's capacity): groups that end in the order of their start are never late.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from weft.rl.schedule.schedules import Partial, Schedule, Sync


@dataclass
class _Flying:
    start: int
    tokens: int = 0


@dataclass(frozen=True)
class _Ready:
    group: int
    oldest: int
    tokens: int


class Pacer:
    """Groups by their numbers, versions by the optimizer steps that this loop has made."""

    def __init__(self, schedule: Schedule, batch: int) -> None:
        if batch < 1:
            raise ValueError(f"a batch must have at least 1 group, got {batch}")
        self.schedule, self.batch = schedule, batch
        self.version = 0
        self.late_groups = 0
        self._numbers = 0
        self._flying: dict[int, _Flying] = {}
        self._ready: list[_Ready] = []
        self._training: list[int] = []

    @property
    def due(self) -> int:
        return self.version + bool(self._training)

    @property
    def flying(self) -> int:
        """Groups under way."""
        return len(self._flying)

    @property
    def ready(self) -> int:
        """Groups that wait to be trained."""
        return len(self._ready)

    @property
    def most(self) -> int:
        """The number of groups that are started for one batch."""
        return math.ceil(self.batch * (self.schedule.oversample if isinstance(self.schedule, Sync) else 1))

    @property
    def capacity(self) -> int:
        """Groups that may be under way at a time."""
        if isinstance(self.schedule, Partial):
            return self.schedule.in_flight
        return self.most if isinstance(self.schedule, Sync) else self.batch * (self.schedule.max_lag + 1)

    def room(self) -> int:
        """How many groups may start now."""
        if isinstance(self.schedule, Partial):
            return 0 if self.full() else self.capacity - self.flying
        if isinstance(self.schedule, Sync) and self._training:
            return 0
        return max(0, self.capacity - self.flying - self.ready - len(self._training))

    def start(self) -> int:
        """Start a group with the present version, and return the group's number."""
        self._numbers += 1
        self._flying[self._numbers] = _Flying(self.version)
        return self._numbers

    def progress(self, group: int, tokens: int) -> None:
        """Note how many tokens of a group under way have been drawn so far."""
        if group in self._flying:
            self._flying[group].tokens = tokens

    def finish(self, group: int, tokens: int, oldest: int | None = None) -> None:
        """A group is complete. `oldest` is the version of its oldest token, as the server reported it."""
        flying = self._flying.pop(group)
        self._ready.append(_Ready(group, flying.start if oldest is None else oldest, tokens))

    def drop(self, group: int) -> None:
        """A group under way has failed, was cancelled, or is not worth training on."""
        self._flying.pop(group, None)

    def late(self) -> list[int]:
        """Groups, under way or ready, that can no longer be trained. They are forgotten: cancel them."""
        least = self.due - self.schedule.max_lag
        gone = [group for group, flying in self._flying.items() if flying.start < least]
        gone += [ready.group for ready in self._ready if ready.oldest < least]
        for group in gone:
            self._flying.pop(group, None)
        self._ready = [ready for ready in self._ready if ready.oldest >= least]
        self.late_groups += len(gone)
        return gone

    def full(self) -> bool:
        """True if a batch is ready."""
        if not isinstance(self.schedule, Partial):
            return self.ready >= self.batch
        tokens = sum(ready.tokens for ready in self._ready)
        if self.schedule.budget == "generated":
            tokens += sum(flying.tokens for flying in self._flying.values())
        return self.ready > 0 and tokens >= self.schedule.tokens

    def take(self) -> list[int]:
        """The next batch, oldest first, in training from now on; [] while none is ready or another is in training."""
        self.late()
        if self._training or not self.full():
            return []
        self._ready.sort(key=lambda ready: (ready.oldest, ready.group))
        count = self.ready if isinstance(self.schedule, Partial) else self.batch
        taken, self._ready = self._ready[:count], self._ready[count:]
        self._training = [ready.group for ready in taken]
        return list(self._training)

    def stepped(self, moved: bool = True) -> None:
        """The batch is trained; `moved` is False if there was nothing in it to train on."""
        self._training = []
        self.version += moved

    def state_dict(self) -> dict[str, Any]:
        """The state that outlives the process: no groups, which die with the process."""
        return {"version": self.version, "numbers": self._numbers, "late": self.late_groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._flying, self._ready, self._training = {}, [], []
        self.version, self._numbers, self.late_groups = (int(state[key]) for key in ("version", "numbers", "late"))
