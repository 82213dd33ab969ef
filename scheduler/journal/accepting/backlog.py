"""How much each organisation has queued, in operations and in bytes of their bodies: back-pressure before memory.

What is being accepted counts from the moment it is let in, so that many at once cannot pass the limit together.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from scheduler.order.operations import QueueFull


class Backlog(Protocol):
    def take(self, org_id: str, size_bytes: int) -> None:
        """Let an operation in. Raises QueueFull. One body alone is always let in: its size has a limit of its own."""

    def add(self, org_id: str, size_bytes: int) -> None:
        """Count an operation that was let in by an earlier process."""

    def release(self, org_id: str, size_bytes: int) -> None:
        """An operation has ended, or was not accepted after all."""

    def of(self, org_id: str) -> tuple[int, int]:
        """Operations and bytes that an organisation has queued."""


class LocalBacklog:
    """Of this process."""

    def __init__(self, max_ops: int, max_bytes: int) -> None:
        self._max_ops = max_ops
        self._max_bytes = max_bytes
        self._ops: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def take(self, org_id: str, size_bytes: int, elsewhere: tuple[int, int] = (0, 0)) -> None:
        """`elsewhere` are the operations and bytes that other processes have queued."""
        ops, held = (here + there for here, there in zip(self.of(org_id), elsewhere, strict=True))
        if ops >= self._max_ops:
            raise QueueFull(f"{ops} operations are queued; the limit is {self._max_ops}: wait for some to end")
        if held and held + size_bytes > self._max_bytes:
            raise QueueFull(
                f"{held} bytes are queued and this operation has {size_bytes}; the limit is {self._max_bytes}: "
                "wait for some to end"
            )
        self.add(org_id, size_bytes)

    def add(self, org_id: str, size_bytes: int) -> None:
        self._ops[org_id] += 1
        self._bytes[org_id] += size_bytes

    def release(self, org_id: str, size_bytes: int) -> None:
        self._ops[org_id] -= 1
        self._bytes[org_id] -= size_bytes
        if self._ops[org_id] <= 0:
            del self._ops[org_id], self._bytes[org_id]

    def of(self, org_id: str) -> tuple[int, int]:
        return self._ops.get(org_id, 0), self._bytes.get(org_id, 0)

    def all(self) -> dict[str, tuple[int, int]]:
        return {org_id: self.of(org_id) for org_id in self._ops}
