"""Decides which adapters may be in memory if not all that requests need fit.

An adapter is admitted if it fits beside those admitted before, or if none is, and stays admitted until no present
request needs it. Waiting adapters are admitted one of each tenant in turn (start-time fair queueing, an adapter a turn;
a tenant's turns go to its highest priorities), and strictly in that order. So a stream of small adapters does not keep
a large one waiting, nor does a tenant with many adapters keep out a tenant with one.

For the first adapter that waits, as many others as it needs are emptied: requests that came before it still start with
them, later ones wait until they are admitted again. Emptied first are adapters of the tenant that has most of the
memory, the oldest first. Requests that have started run to their end, and requests whose adapter is not emptied go on.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping

from workers.generator.adapters import AdapterCache, HeldAdapter
from workers.generator.requests.progress import RequestProgress


class Admission:
    def __init__(self, adapters: AdapterCache) -> None:
        self._adapters = adapters
        #: True if a request waits for others to release memory.
        self.short = False
        # admitted adapters, the oldest first, with the tenant that each was admitted for
        self._admitted: dict[HeldAdapter, str] = {}
        self._fresh: set[HeldAdapter] = set()  # admitted adapters that no request has started with yet
        self._turns: dict[HeldAdapter, int] = {}  # by waiting adapter: its turn
        self._turn = 0  # the latest turn that was admitted
        self._last: dict[str, int] = {}  # by tenant: its last turn, if that is still to come
        self._unknown: HeldAdapter | None = None  # the adapter whose turn it is, but whose size is not known

    def decide(self, here: Iterable[RequestProgress]) -> None:
        """Decide which of the requests `here` may start (`held_up`), and begin the next read."""
        using = [(progress, progress.adapter) for progress in here if progress.adapter is not None]
        if all(progress.started and not held.waits for progress, held in using):  # true in most steps
            self.short = False
            return
        started = {held for progress, held in using if progress.started}
        waiting = sorted((each for each in using if not each[0].started), key=lambda each: each[0].place)
        wanted: dict[HeldAdapter, RequestProgress] = {}  # by adapter: the first request that waits for it
        for progress, held in waiting:
            wanted.setdefault(held, progress)
        here_still = {held for held in (*started, *wanted) if held.needs_bytes is not None}
        self._admitted = {held: tenant for held, tenant in self._admitted.items() if held in here_still}
        self._fresh = (self._fresh & self._admitted.keys()) - started
        first, emptied = self._admit(wanted, started)
        for progress, held in waiting:
            behind = first is not None and held in emptied and first.before(progress)
            progress.held_up = held not in self._admitted or behind
            if not (progress.awaits or held.weights):  # it was in memory, and had to make room
                progress.awaits = held.asked
        self.short = first is not None
        self._read_next({*started, *wanted})

    def _admit(
        self, wanted: Mapping[HeldAdapter, RequestProgress], started: Collection[HeldAdapter]
    ) -> tuple[RequestProgress | None, Collection[HeldAdapter]]:
        """Admit adapters that fit. Returns the first request whose adapter does not fit, and the adapters that it waits
        for."""
        line = self._line(wanted)
        while (first := self._fill(line)) is not None:
            held, progress = first
            emptied = self._emptied(held, progress.request.tenant)
            empty = [
                other
                for other in emptied
                if other not in started and not (other in wanted and wanted[other].before(progress))
            ]
            if not empty:
                return progress, emptied
            for other in empty:
                del self._admitted[other]
        return None, ()

    def _line(self, wanted: Mapping[HeldAdapter, RequestProgress]) -> list[tuple[HeldAdapter, RequestProgress]]:
        """Waiting adapters with their first requests, in the order of admission."""
        line = [(held, progress) for held, progress in wanted.items() if held not in self._admitted]
        turns = defaultdict[str, list[int]](list)  # by tenant, in order
        for held, progress in sorted(line, key=lambda each: each[1].number):
            tenant = progress.request.tenant
            if held in self._turns:
                insort(turns[tenant], self._turns[held])
            else:
                self._last[tenant] = max(self._turn, self._last.get(tenant, 0) + 1)
                turns[tenant].append(self._last[tenant])
        self._turns = {
            held: turns[progress.request.tenant].pop(0)
            for held, progress in sorted(line, key=lambda each: each[1].place)
        }
        return sorted(line, key=lambda each: (self._turns[each[0]], each[1].number))

    def _fill(self, line: list[tuple[HeldAdapter, RequestProgress]]) -> tuple[HeldAdapter, RequestProgress] | None:
        """Admit adapters in this order while they fit; returns the first that does not. After one of unknown size, only
        adapters in memory are admitted."""
        self._unknown = None
        for held, progress in line:
            size = held.needs_bytes
            if size is None:
                self._unknown = self._unknown or held
            if size is None or held in self._admitted or (self._unknown and not held.weights):
                continue
            taken = self._taken_bytes
            if taken and taken + size > self._adapters.max_bytes:
                return held, progress
            self._admitted[held] = progress.request.tenant
            self._fresh.add(held)
            self._turn = max(self._turn, self._turns[held])
            self._last = {tenant: last for tenant, last in self._last.items() if last >= self._turn}
        return None

    @property
    def _taken_bytes(self) -> int:
        """Memory taken by admitted adapters, and by a read for another adapter or of newer weights."""
        flight = self._adapters.flight
        beside = flight is not None and (flight.held.weights or flight.held not in self._admitted)
        return sum(held.needs_bytes or 0 for held in self._admitted) + (flight.size_bytes if flight and beside else 0)

    def _emptied(self, first: HeldAdapter, tenant: str) -> list[HeldAdapter]:
        """The admitted adapters that must make room, except those that no request has started with yet."""
        shares, excess = Counter({tenant: first.needs_bytes or 0}), -self._adapters.max_bytes
        for held, owner in self._admitted.items():
            shares[owner] += held.needs_bytes or 0
        excess += shares.total()
        may = [held for held in self._admitted if held not in self._fresh]
        emptied: list[HeldAdapter] = []
        while may and excess > 0:
            most = max(may, key=lambda held: shares[self._admitted[held]])
            may.remove(most)
            emptied.append(most)
            shares[self._admitted[most]] -= most.needs_bytes or 0
            excess -= most.needs_bytes or 0
        return emptied

    def _read_next(self, held_here: Iterable[HeldAdapter]) -> None:
        """Begin the oldest requested read of an adapter that is admitted, has newer weights, or has to be tried because
        its size is not known."""
        if self._adapters.flight is not None:
            return
        may_be = (held for held in held_here if held.weights or held in self._admitted or held is self._unknown)
        held = min((held for held in may_be if held.waits), key=lambda held: held.asked, default=None)
        if held is not None and held.needs_bytes is None:
            self._adapters.try_to_read(held)
        elif held is not None:
            self._adapters.begin(held, {*self._admitted, held})
