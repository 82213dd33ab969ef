"""Which numbers of runs and samplers have been taken: (lane, seq) names one operation for as long as its row is kept.

The database knows, and refuses a second operation of a number. That most are new is known without asking it: the one
process that accepts all of a sampler's requests remembers the highest of each of its clients.
"""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session
from weft.wire.base import MAX_INT

from scheduler.journal.ending.completions import CLIENT_STRIDE
from store.tables import Operation

#: Samplers' clients remembered at a time.
MOST = 100_000


def known(session: Session, lane: str, seq: int) -> bool:
    """Whether that operation was accepted before."""
    return session.scalar(select(Operation.id).filter_by(lane=lane, seq=seq)) is not None


def highest(session: Session, lane: str, client: int) -> int:
    """The highest number that a client of a sampler has used; -1 if none."""
    first = client * CLIENT_STRIDE
    numbers = Operation.seq.between(first, min(first + CLIENT_STRIDE - 1, MAX_INT))  # the last client's are fewer
    found = session.scalar(select(func.max(Operation.seq)).where(Operation.lane == lane, numbers))
    return -1 if found is None else found


class Highest:
    """The highest number of each client of each sampler. Lives in the event loop."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int], int] = {}

    def is_new(self, lane: str, seq: int) -> bool:
        """False where the database has to be asked."""
        found = self._numbers.get((lane, seq // CLIENT_STRIDE))
        return found is not None and seq > found

    def found(self, lane: str, seq: int, number: int) -> None:
        """The client that `seq` is of had used numbers up to this one."""
        if len(self._numbers) >= MOST:
            self._numbers.clear()
        key = lane, seq // CLIENT_STRIDE
        self._numbers[key] = max(number, self._numbers.get(key, -1))

    def used(self, lane: str, seq: int) -> None:
        """A new operation has this number."""
        if self.is_new(lane, seq):
            self._numbers[lane, seq // CLIENT_STRIDE] = seq
