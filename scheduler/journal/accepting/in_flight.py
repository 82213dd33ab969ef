"""How much of a key, a project and an organisation is in flight: its unfinished samples, and its runs that have
unfinished operations. However many operations a run has waiting, it computes one after the other, so it counts once:
nothing that a run waits for can be kept out by what already waits behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from scheduler.order.operations import SAMPLE


class Work(Protocol):
    """A NewOperation or an Operation."""

    @property
    def org_id(self) -> str: ...
    @property
    def key_id(self) -> int | None: ...
    @property
    def project_id(self) -> str | None: ...
    @property
    def lane(self) -> str: ...
    @property
    def seq(self) -> int: ...
    @property
    def kind(self) -> str: ...


@dataclass(frozen=True)
class Elsewhere:
    """The number of units that other processes have in flight in a scope; or just that the run in question is one of
    them (`has`)."""

    count: int = 0
    has: bool = False


#: Finds what other processes have in flight for a (scope, id); if given a piece of work, also whether its unit is among
#: that.
Look = Callable[[str, str, Work | None], Awaitable[Elsewhere]]


class InFlight:
    """Units of work in flight by (scope, id), where scope is organisation, project or key: those of this process, and
    those that `look` finds elsewhere. Lives in the event loop."""

    def __init__(self, look: Look | None = None) -> None:
        self._units: defaultdict[tuple[str, str], dict[str, int]] = defaultdict(dict)
        self._look = look

    def count(self, scope: str, id: str) -> int:
        """Units in flight in this process."""
        return len(self._units.get((scope, id), ()))

    def has(self, scope: str, id: str, work: Work) -> bool:
        """True if the unit that `work` belongs to (its run) is in flight in this process already."""
        return _unit(work) in self._units.get((scope, id), ())

    async def elsewhere(self, scope: str, id: str, work: Work | None = None) -> Elsewhere:
        """What is in flight in other processes. Must be called before `count`: between `count` and `arriving` nothing
        else may happen in the event loop."""
        return await self._look(scope, id, work) if self._look else Elsewhere()

    def add(self, work: Work) -> None:
        unit = _unit(work)
        for owner in _owners(work):
            units = self._units[owner]
            units[unit] = units.get(unit, 0) + 1

    def remove(self, work: Work) -> None:
        unit = _unit(work)
        for owner in _owners(work):
            units = self._units[owner]
            left = units.pop(unit, 0) - 1
            if left > 0:
                units[unit] = left
            if not units:
                del self._units[owner]

    @contextmanager
    def arriving(self, work: Work) -> Iterator[None]:
        """Count `work` while it is being accepted: many may arrive at the same moment."""
        self.add(work)
        try:
            yield
        finally:
            self.remove(work)


def _unit(work: Work) -> str:
    return f"{work.lane} {work.seq}" if work.kind == SAMPLE else work.lane


def _owners(work: Work) -> list[tuple[str, str]]:
    owners = [("organisation", work.org_id)]
    if work.project_id is not None:
        owners.append(("project", f"{work.org_id} {work.project_id}"))
    if work.key_id is not None:
        owners.append(("key", str(work.key_id)))
    return owners
