"""Which numbers of runs and samplers have been taken: (lane, seq) names one operation for as long as its row is kept.

The database knows, and refuses a second operation of a number. Mostly it need not be asked: the process that accepts
all of a sampler's requests remembers the highest number of each client.
"""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session
from weft.wire.base import MAX_INT

from scheduler.journal.ending.completions import CLIENT_STRIDE
from store.tables import Operation

#: How many clients of samplers are remembered.
MOST = 100_000


def known(session: Session, lane: str, seq: int) -> bool:
    """True if the database has an operation of this (lane, seq)."""
    return session.scalar(select(Operation.id).filter_by(lane=lane, seq=seq)) is not None


def highest(session: Session, lane: str, client: int) -> int:
    """The highest number that a client of a sampler has used; -1 if none."""
    first = client * CLIENT_STRIDE
    # the range of the last client is shorter
    numbers = Operation.seq.between(first, min(first + CLIENT_STRIDE - 1, MAX_INT))
    found = session.scalar(select(func.max(Operation.seq)).where(Operation.lane == lane, numbers))
    return -1 if found is None else found


class Highest:
    """The highest number of each client of each sampler. Lives in the event loop."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int], int] = {}

    def is_new(self, lane: str, seq: int) -> bool:
        """True if the number is certainly new. If False, only the database knows."""
        found = self._numbers.get((lane, seq // CLIENT_STRIDE))
        return found is not None and seq > found

    def found(self, lane: str, seq: int, number: int) -> None:
        """The client that `seq` belongs to had used numbers up to this one."""
        if len(self._numbers) >= MOST:
            self._numbers.clear()
        key = lane, seq // CLIENT_STRIDE
        self._numbers[key] = max(number, self._numbers.get(key, -1))

    def used(self, lane: str, seq: int) -> None:
        """A new operation has this number."""
        if self.is_new(lane, seq):
            self._numbers[lane, seq // CLIENT_STRIDE] = seq
