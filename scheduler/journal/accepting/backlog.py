"""How much each organisation has queued, in operations and in bytes of their bodies: back-pressure before memory.

An operation counts from the moment it is let in, before it is accepted, so that many at once cannot exceed the limit
together.
"""

from __future__ import annotations

from collections import Counter

from scheduler.order.operations import QueueFull


class Backlog:
    """The backlog of all replicas: of this process, and what the other replicas report. An embedded service has no
    others."""

    def __init__(self, max_ops: int, max_bytes: int) -> None:
        self._max_ops = max_ops
        self._max_bytes = max_bytes
        self._ops: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._others_ops: Counter[str] = Counter()
        self._others_bytes: Counter[str] = Counter()

    def take(self, org_id: str, size_bytes: int) -> None:
        """Let an operation in. Raises QueueFull. A single body is always let in: its size has a limit of its own."""
        ops, held = self.of(org_id)
        if ops >= self._max_ops:
            raise QueueFull(f"{ops} operations are queued; the limit is {self._max_ops}: wait for some to end")
        if held and held + size_bytes > self._max_bytes:
            raise QueueFull(
                f"{held} bytes are queued and this operation has {size_bytes}; the limit is {self._max_bytes}: "
                "wait for some to end"
            )
        self.add(org_id, size_bytes)

    def add(self, org_id: str, size_bytes: int) -> None:
        """Count an operation that was let in by an earlier process."""
        self._ops[org_id] += 1
        self._bytes[org_id] += size_bytes

    def release(self, org_id: str, size_bytes: int) -> None:
        """An operation has ended, or was not accepted after all."""
        self._ops[org_id] -= 1
        self._bytes[org_id] -= size_bytes
        if self._ops[org_id] <= 0:
            del self._ops[org_id], self._bytes[org_id]

    def of(self, org_id: str) -> tuple[int, int]:
        """Operations and bytes that an organisation has queued."""
        return self._ops[org_id] + self._others_ops[org_id], self._bytes[org_id] + self._others_bytes[org_id]

    def own(self) -> dict[str, tuple[int, int]]:
        """The backlog of this process, by organisation: operations and bytes."""
        return {org_id: (ops, self._bytes[org_id]) for org_id, ops in self._ops.items()}

    def hear(self, others: list[dict[str, tuple[int, int]]]) -> None:
        """Replace the backlogs of the other replicas; `others` has one for each."""
        self._others_ops, self._others_bytes = Counter(), Counter()
        for said in others:
            for org_id, (ops, held) in said.items():
                self._others_ops[org_id] += ops
                self._others_bytes[org_id] += held
