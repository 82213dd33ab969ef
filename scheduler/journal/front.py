"""What the HTTP front uses of a journal, be it that of the embedded service or a replica's."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

from scheduler.journal.accepting.in_flight import InFlight
from scheduler.journal.ending.completions import CompletionFeeds
from scheduler.journal.ending.meters import Meters
from scheduler.journal.ending.outcomes import Answers
from scheduler.journal.samples.streams import TokenStreams
from scheduler.order.operations import Gone, NewOperation, Outcome, Waiting
from store import tables

#: Work that waits keeps a session whose client is silent for at most so long. So long after the session has ended it is
#: given up: nobody waits for it, and it would hold money for ever where its model is not served any more.
WORK_WAITS = timedelta(hours=24)


class OperationJournal(Protocol):
    """`draining`: nothing new is accepted, because the server is about to stop."""

    @property
    def draining(self) -> bool: ...
    @property
    def meters(self) -> Meters: ...
    @property
    def in_flight(self) -> InFlight: ...
    @property
    def completions(self) -> CompletionFeeds: ...
    @property
    def streams(self) -> TokenStreams: ...
    @property
    def answers(self) -> Answers: ...

    async def taken(self, lane: str, seq: int) -> bool:
        """Whether that number of a run or sampler has been used before. A repeat is not judged again: what it needed
        may be gone by now."""

    async def accept(self, new: NewOperation, *rows: tables.Base) -> str:
        """Make `new` (and `rows`) durable, queue it, and return its request id. A repeat returns the first id.

        Raises SequenceReused, QueueFull, Draining, NoRoom, RunClosed, OutOfMoney."""

    async def outcome(self, org_id: str, request_id: str, timeout_s: float) -> Outcome | Waiting | Gone | None:
        """How an operation ended, waiting at most `timeout_s` for it; None when this organisation has no such one."""

    async def tell_failure(self, org_id: str, request_id: str) -> None:
        """Before a client is told that an operation has failed. What it sends of its run afterwards, and waits for
        nothing before, shows that it goes on knowing that (`scheduler.order.gradients`)."""

    async def cancel(self, org_id: str, request_id: str) -> bool:
        """Stop a sample: one that waits ends at once and empty, one that runs ends with the tokens it has."""

    def close_run(self, run_id: str) -> None:
        """Its session has ended: let queued work finish, unless it has waited for WORK_WAITS, then forget the run.
        To be called again until it is forgotten."""

    async def working_sessions(self) -> set[str]:
        """Sessions with operations that can go on; one that waits for a number that never came cannot, nor can what has
        waited for WORK_WAITS."""

    async def queue_lengths(self) -> dict[str, int]:
        """How many operations have not ended (`open`), are `running`, and how many `runs` take operations."""
