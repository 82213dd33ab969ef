"""The workers of a fair queue in one process: who is there, what they hold, and which of them an item is left to.

Pure state, no clock, no lock. `roster.lua` keeps the same in Redis.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from scheduler.links.contract import HEAD_START, REMEMBERED


def fullness(free: int, slots: int) -> float:
    """The share of a worker's slots that are busy; not for a worker without slots."""
    return 1 - free / slots


def remember(memory: OrderedDict[str, str], key: str, value: str = "") -> None:
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > REMEMBERED:
        memory.popitem(last=False)


@dataclass
class Worker:
    """`slots`: how many it had when it last leased; `room`: how many of these are still free, less those of items left
    to it since."""

    deadline: float = 0.0
    models: frozenset[str] = frozenset()
    slots: int = 0
    room: int = 0
    holds: OrderedDict[str, str] = field(default_factory=OrderedDict)  # adapters, the latest last


class Roster:
    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}

    def sign(self, name: str, deadline: float, models: Sequence[str] | None = None) -> bool:
        """A sign of life; with `models` it also registers the worker. False for an unknown worker without `models`."""
        if models is not None:
            self._workers.setdefault(name, Worker()).models = frozenset(models)
        elif name not in self._workers:
            return False
        self._workers[name].deadline = deadline
        return True

    def __len__(self) -> int:
        return len(self._workers)

    def comes(self, name: str, busy: int, free: int) -> None:
        """A worker has `busy` slots, by the items that it holds, and `free` ones."""
        self._workers[name].slots, self._workers[name].room = busy + free, free

    def fills(self, name: str, slots: int) -> None:
        """Note that `slots` of the worker's free slots are taken now."""
        self._workers[name].room -= slots

    def holds(self, name: str, adapter: str) -> None:
        if adapter:
            remember(self._workers[name].holds, adapter)

    def gone(self, now: float) -> list[str]:
        """Forget the workers whose deadline has passed. Returns them, the one with the oldest deadline first."""
        late = sorted((w.deadline, name) for name, w in self._workers.items() if w.deadline < now)
        for _, name in late:
            del self._workers[name]
        return [name for _, name in late]

    def serving(self, model: str) -> list[str]:
        return sorted(name for name, worker in self._workers.items() if model in worker.models)

    def has_room(self, model: str, name: str) -> bool:
        """Whether another worker than `name` has slots free for a model."""
        return any(self._workers[other].room > 0 for other in self.serving(model) if other != name)

    def better_for(self, adapter: str, model: str, name: str, never: Iterable[str]) -> str | None:
        """The emptiest other worker that would serve an item better than `name`: it holds `adapter` (and `name` does
        not), has room, is not much fuller, and is not in `never`."""
        asks = self._workers[name]
        if not adapter or adapter in asks.holds:
            return None
        others = {other: self._workers[other] for other in self.serving(model) if other not in {name, *never}}
        full = {
            other: fullness(worker.room, worker.slots)
            for other, worker in others.items()
            if worker.room > 0 and adapter in worker.holds
        }
        best = min(full, key=full.__getitem__, default=None)
        most = fullness(asks.room, asks.slots) + HEAD_START
        return best if best is not None and full[best] < most else None
