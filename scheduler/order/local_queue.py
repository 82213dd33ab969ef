"""The fair queue in one process: `scheduler.order.fair` with leases. Safe from any thread."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from scheduler.links.contract import (
    LEFT_S,
    LIVES,
    MAX_ASIDE,
    TAKEN_S,
    Answered,
    Expired,
    Item,
    Lease,
    Path,
    flow_of,
)
from scheduler.order.fair import FairTree
from scheduler.order.roster import Roster


@dataclass
class _Held:
    """A queued item: which worker has it on lease, since when, and with what result."""

    item: Item
    attempts: int = 0
    worker: str | None = None
    epoch: int = 0
    leased_at: float = 0.0
    result: bytes | None = None
    taken_until: float = 0.0
    declined: dict[str, str] = field(default_factory=dict)  # by worker: why
    left_to: str | None = None  # the worker for which it is set aside
    left_until: float = 0.0

    @property
    def slots(self) -> int:
        return max(1, self.item.slots)


class LocalQueue:
    """The fair queue of one process; `tree` has the fair order."""

    def __init__(self, clock: Callable[[], float] = time.time, tree: FairTree[str] | None = None) -> None:
        self._clock = clock
        self._tree = FairTree[str]() if tree is None else tree
        self._items: dict[str, _Held] = {}
        self._hands: defaultdict[str, dict[str, _Held]] = defaultdict(dict)  # by worker: the items that it holds
        self._busy: Counter[str] = Counter()  # by worker: the slots of these
        self._flows: Counter[Path] = Counter()  # how many items of each are in workers' hands
        self._expected = 0
        self._roster = Roster()
        self._aside: defaultdict[str, dict[str, None]] = defaultdict(dict)  # by model: items set aside, in order
        self._given_up: set[str] = set()
        self._epochs = 0
        self._changed = threading.Condition()

    def expect(self, workers: int) -> None:
        """While fewer workers are present, items that all of these have declined wait for the others."""
        self._expected = workers

    def push(self, item: Item) -> bool:
        with self._changed:
            if item.id in self._items:
                return False
            self._items[item.id] = _Held(item)
            self._queue(item)
            return True

    def correct(self, path: Path, tokens: int) -> None:
        with self._changed:
            self._tree.correct(path, tokens)

    def peek(self, prefix: Path = ()) -> str | None:
        with self._changed:
            found = self._tree.peek(prefix)
            return found[0] if found is not None else None

    def remove(self, item_id: str) -> bool:
        with self._changed:
            if not self._queued(item_id):
                return False
            self._withdraw(item_id)
            del self._items[item_id]
            return True

    def ahead(self, item_id: str) -> int | None:
        with self._changed:
            if not self._queued(item_id) or self._is_aside(item_id):
                return None
            return self._tree.ahead(self._items[item_id].item.path, lambda other: other == item_id)

    def lease(
        self, worker: str, models: Sequence[str], slots: int, ttl_s: float, most: int | None = None, yields: int = 0
    ) -> list[Lease]:
        with self._changed:
            self._roster.sign(worker, self._clock() + ttl_s, models)
            self._roster.comes(worker, self._busy[worker], slots)
            leases: list[Lease] = []
            while slots > 0 and len(leases) != most and (found := self._next_for(worker, models)) is not None:
                held, fresh = found
                other = self._better_for(held, worker) if fresh else None
                if other is not None:
                    self._leave_to(other, held)
                    continue
                slots -= held.slots
                leases.append(self._hand_to(worker, held))
            while slots <= 0 < yields and len(leases) != most and (new := self._newcomer(worker, models)) is not None:
                yields -= new.slots
                leases.append(self._hand_to(worker, new))
            return leases

    def _hand_to(self, worker: str, held: _Held) -> Lease:
        self._epochs += 1
        held.worker, held.epoch, held.leased_at = worker, self._epochs, self._clock()
        self._hands[worker][held.item.id] = held
        self._busy[worker] += held.slots
        self._flows[flow_of(held.item.path)] += 1
        self._roster.holds(worker, held.item.adapter)
        self._roster.fills(worker, held.slots)
        return Lease(held.item.id, held.item.path, held.item.body, held.epoch)

    def _next_for(self, worker: str, models: Sequence[str]) -> tuple[_Held, bool] | None:
        """The next item for a worker; items set aside go first. Also whether it comes from the tree."""
        for model in models:
            for item_id in islice(self._aside[model], MAX_ASIDE):
                held = self._items[item_id]
                free = held.left_to in (None, worker) or held.left_until < self._clock()
                if free and worker not in held.declined:
                    self._withdraw(item_id)
                    return held, False
        fairest = self._fairest(models)
        turn = self._tree.pop((fairest,)) if fairest is not None else None
        return (self._items[turn], True) if turn is not None else None

    def _fairest(self, models: Sequence[str]) -> str | None:
        served = [model for model in models if len(self._aside[model]) < MAX_ASIDE]
        return next((model for model in self._tree.children() if model in served), None)

    def _newcomer(self, worker: str, models: Sequence[str]) -> _Held | None:
        """The next item in order, if a full worker should have it."""
        fairest = self._fairest(models)
        path = self._tree.next((fairest,)) if fairest is not None else None
        if path is None or self._flows[flow_of(path)] or self._roster.has_room(path[0], worker):
            return None
        return self._items[self._tree.take(path, 1)]

    def _better_for(self, held: _Held, worker: str) -> str | None:
        return self._roster.better_for(held.item.adapter, held.item.path[0], worker, held.declined)

    def _leave_to(self, worker: str, held: _Held) -> None:
        held.left_to, held.left_until = worker, self._clock() + LEFT_S
        self._aside[held.item.path[0]][held.item.id] = None
        self._roster.fills(worker, held.slots)

    def renew(self, worker: str, ttl_s: float) -> bool:
        with self._changed:
            return self._roster.sign(worker, self._clock() + ttl_s)

    def holder(self, item_id: str) -> str | None:
        with self._changed:
            held = self._items.get(item_id)
            return held.worker if held is not None else None

    def answer(self, item_id: str, epoch: int, result: bytes) -> bool:
        with self._changed:
            held = self._held(item_id, epoch)
            if held is None:
                return False
            self._let_go(held)
            held.result = result
            self._changed.notify()
            return True

    def lose(self, item_id: str, epoch: int) -> bool:
        with self._changed:
            held = self._held(item_id, epoch)
            if held is None:
                return False
            self._lose(held)
            return True

    def decline(self, item_id: str, epoch: int, why: str) -> list[str] | None:
        with self._changed:
            held = self._held(item_id, epoch)
            if held is None or held.worker is None:
                return None
            held.declined[held.worker] = why
            if not self._able(item_id)[0]:
                return sorted(set(held.declined.values()))
            self._let_go(held)
            self._aside[held.item.path[0]][item_id] = None
            return []

    def answered(self, consumer: str, timeout_s: float) -> list[Answered]:
        with self._changed:
            self._changed.wait_for(self._waiting, timeout_s)
            found = []
            for item_id in self._waiting():
                held = self._items[item_id]
                held.taken_until = self._clock() + TAKEN_S
                item = held.item
                found.append(Answered(item_id, held.result or b"", item.cost, held.leased_at, item_id, item.op))
            return found

    def forget(self, item_id: str, receipt: str = "") -> None:
        with self._changed:
            held = self._items.get(item_id)
            if held is None:
                return
            if self._queued(item_id):
                self._withdraw(item_id)
            self._let_go(held)
            del self._items[item_id]
            self._given_up.discard(item_id)

    def expire(self) -> Expired:
        with self._changed:
            expired = Expired()
            for worker in self._roster.gone(self._clock()):
                self._release(worker, expired)
            expired.given_up.extend(sorted(self._given_up))
            for item_id in sorted(item_id for ids in self._aside.values() for item_id in ids):
                if self._able(item_id) == (False, True):
                    expired.declined.append((item_id, sorted(set(self._items[item_id].declined.values()))))
            return expired

    def known(self, item_ids: Sequence[str]) -> set[str]:
        with self._changed:
            return {item_id for item_id in item_ids if item_id in self._items}

    def _held(self, item_id: str, epoch: int) -> _Held | None:
        """The item of this id; None unless a worker holds it under this epoch."""
        held = self._items.get(item_id)
        return held if held is not None and held.worker is not None and held.epoch == epoch else None

    def _let_go(self, held: _Held) -> None:
        """Take the item from the worker that holds it."""
        if held.worker is not None:
            del self._hands[held.worker][held.item.id]
            self._busy[held.worker] -= held.slots
            flow = flow_of(held.item.path)
            self._flows[flow] -= 1
            if not self._flows[flow]:
                del self._flows[flow]
            held.worker = None

    def _release(self, worker: str, expired: Expired) -> None:
        for held in list(self._hands[worker].values()):
            if self._lose(held):
                expired.back.append(held.item.id)
        del self._hands[worker], self._busy[worker]

    def _lose(self, held: _Held) -> bool:
        """The item's worker has died over it. Returns whether it is queued again."""
        self._let_go(held)
        held.attempts += 1
        if held.attempts >= LIVES:
            held.epoch = -1
            self._given_up.add(held.item.id)
            return False
        self._tree.correct(held.item.path, -held.item.cost)
        self._queue(held.item)
        return True

    def _able(self, item_id: str) -> tuple[bool, bool]:
        """Two answers: whether a present or expected worker may serve the item, and whether any present worker has its
        model."""
        held = self._items[item_id]
        there = self._roster.serving(held.item.path[0])
        may = len(self._roster) < self._expected or any(worker not in held.declined for worker in there)
        return may, bool(there)

    def _is_aside(self, item_id: str) -> bool:
        return item_id in self._aside[self._items[item_id].item.path[0]]

    def _withdraw(self, item_id: str) -> None:
        """Take a waiting item out of the tree, or out of those set aside."""
        path = self._items[item_id].item.path
        if self._is_aside(item_id):
            self._items[item_id].left_to = None
            del self._aside[path[0]][item_id]
        else:
            self._tree.discard(path, item_id)

    def _queue(self, item: Item) -> None:
        self._tree.push(item.path, item.id, item.cost, weight=item.weight)

    def _queued(self, item_id: str) -> bool:
        held = self._items.get(item_id)
        return held is not None and held.worker is None and held.result is None and held.epoch >= 0

    def _waiting(self) -> list[str]:
        now = self._clock()
        return [i for i, held in self._items.items() if held.result is not None and held.taken_until <= now]
