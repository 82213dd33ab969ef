"""Letting a new operation into a journal, and counting it until it ends.

What it takes to be durable is in `scheduler.journal.accepting.acceptance`; where it is queued then is the `Queues`'
affair.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Protocol

from sqlalchemy.exc import IntegrityError, OperationalError, TimeoutError as PoolTimeout

from billing.metering.quotas import QuotaReached
from billing.money.accounts import OutOfMoney
from scheduler.journal.accepting.acceptance import Acceptance
from scheduler.journal.accepting.backlog import Backlog
from scheduler.journal.accepting.in_flight import InFlight
from scheduler.journal.ending.meters import Meters
from scheduler.journal.ending.outcomes import Answers
from scheduler.order.operations import NewOperation, Operation, Outcome
from store import tables
from store.blobs.room import NoRoom, Room

log = logging.getLogger(__name__)


class Queues(Protocol):
    """The queues that accepted operations go to: in this process, or shared by replicas."""

    async def check(self, new: NewOperation) -> None:
        """Raise Draining or RunClosed unless `new` can be queued."""

    def maybe_stored(self, new: NewOperation) -> bool:
        """Whether an operation that is no longer in memory may have used the number of `new`."""

    def put(self, op: Operation) -> None:
        """Queue an operation that was just accepted."""

    async def adopt(self, request_id: str) -> None:
        """Queue an operation whose row was written although its client got an error."""

    def skip(self, op: Operation) -> None:
        """The operation ended at once: later ones need not wait for its number."""


class Admission:
    def __init__(
        self,
        acceptance: Acceptance,
        room: Room,
        backlog: Backlog,
        in_flight: InFlight,
        answers: Answers,
        meters: Meters,
        queues: Queues,
    ) -> None:
        self._acceptance, self._room, self._queues = acceptance, room, queues
        self._backlog, self._in_flight = backlog, in_flight
        self._answers, self._meters = answers, meters
        self.open: dict[str, Operation] = {}  # accepted and not ended

    async def accept(self, new: NewOperation, rows: tuple[tables.Base, ...]) -> str:
        """`OperationJournal.accept`."""
        try:
            request_id = await self._acceptance.known(new, maybe_stored=self._queues.maybe_stored(new))
            if request_id is None:
                op = await self._take(new, rows)
        except (IntegrityError, OutOfMoney, QuotaReached):
            # Another replica may just have accepted it, or this one without noticing; its tokens and money are then
            # held already.
            request_id = await self._acceptance.known(new, maybe_stored=True)
            if request_id is None:
                raise
        except (OSError, OperationalError, PoolTimeout) as error:
            raise NoRoom(self._room.refused(error)) from error
        if request_id is not None:
            if request_id not in self.open and self._answers.recent(request_id) is None:
                await self._queues.adopt(request_id)
            return request_id
        self._meters.accepted(op)
        log.debug("accepted %s", op.kind)
        if new.refused is None:
            self._begin(op)
            self._queues.put(op)
        else:
            self._refuse(op, new.refused)
        return op.id

    async def _take(self, new: NewOperation, rows: tuple[tables.Base, ...]) -> Operation:
        await self._queues.check(new)
        self._room.check()
        self._backlog.take(new.org_id, len(new.body))
        try:
            return await self._acceptance.take(new, rows)
        except BaseException:
            self._backlog.release(new.org_id, len(new.body))
            raise

    def _refuse(self, op: Operation, why: str) -> None:
        """Accept as failed an operation that the API has refused."""
        op.outcome = Outcome(error=why, category="user")
        self._answers.remember(op)
        self.forget(op)
        self._queues.skip(op)

    def take_over(self, op: Operation) -> None:
        """An operation that another process accepted is in this process's hands from now on."""
        self._backlog.add(op.org_id, op.body_bytes)
        self._begin(op)

    def _begin(self, op: Operation) -> None:
        self.open[op.id] = op
        self._in_flight.add(op)

    def end(self, op: Operation) -> None:
        """Wake whoever waits for the operation, which has its outcome."""
        self._meters.closed(op, datetime.now(UTC))
        self._answers.remember(op)
        self.forget(op)

    def forget(self, op: Operation) -> None:
        """The operation has ended, here or elsewhere: from now on its row answers for it."""
        if self.open.pop(op.id, None) is not None:
            self._in_flight.remove(op)
        self._backlog.release(op.org_id, op.body_bytes)
        self._acceptance.forget(op)
        op.end()
