"""Requests on this replica that wait for the outcome of an operation. Lives in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from scheduler.order.operations import Outcome


@dataclass
class Wait:
    """A wait for one outcome. `told` is what a broadcast has said of it, for the organisation `org_id` alone."""

    changed: asyncio.Event = field(default_factory=asyncio.Event)
    count: int = 0
    org_id: str = ""
    told: Outcome | None = None

    def wake(self) -> None:
        """Wake the waiters; those who are just looking will look again before they wait."""
        self.changed.set()
        self.changed = asyncio.Event()


class Waiters:
    def __init__(self) -> None:
        self._of: dict[str, Wait] = {}

    def __contains__(self, op_id: str) -> bool:
        return op_id in self._of

    @contextmanager
    def on(self, op_id: str) -> Iterator[Wait]:
        """Wait for this operation within the block."""
        wait = self._of.setdefault(op_id, Wait())
        wait.count += 1
        try:
            yield wait
        finally:
            wait.count -= 1
            if not wait.count:
                self._of.pop(op_id, None)

    def wake(self, op_id: str, org_id: str, told: Outcome | None) -> None:
        """The operation has its outcome, which is `told` or has to be looked up."""
        if (wait := self._of.get(op_id)) is not None:
            wait.org_id, wait.told = org_id, told or wait.told
            wait.wake()

    def wake_all(self) -> None:
        """Have all waiters look again."""
        for wait in self._of.values():
            wait.wake()
