"""The interface of the journal to the API, for the embedded service and for replicas alike."""

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

#: How long waiting work keeps the session of a silent client alive. Once the session has ended, the work is given up
#: after the same time: nobody waits for it, and it would hold money for ever if its model is no longer served.
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
        """True if this number of a run or sampler has been used, so that the request is a repeat. Repeats are not
        checked again: what they refer to may be gone by now."""

    async def accept(self, new: NewOperation, *rows: tables.Base) -> str:
        """Make `new` (and `rows`) durable, queue it, and return its request id. A repeat returns the first id.

        Raises SequenceReused, QueueFull, Draining, NoRoom, RunClosed, OutOfMoney."""

    async def outcome(self, org_id: str, request_id: str, timeout_s: float) -> Outcome | Waiting | Gone | None:
        """How an operation ended, waiting at most `timeout_s` for it. None if this organisation has no such
        operation."""

    async def tell_failure(self, org_id: str, request_id: str) -> None:
        """Call it before a client is told that an operation failed. If the client then sends more of the run, not
        having waited for anything else, it does so knowing of the failure (`scheduler.order.gradients`)."""

    async def cancel(self, org_id: str, request_id: str) -> bool:
        """Stop a sample: one that waits ends at once and empty, one that runs ends with the tokens it has."""

    def close_run(self, run_id: str) -> None:
        """The run's session has ended: let queued work finish, or fail it once it has waited for WORK_WAITS, then
        forget the run. Call it again until the run is forgotten."""

    async def working_sessions(self) -> set[str]:
        """Sessions with operations that can still run. Not those whose operations wait for a number that never came, or
        have waited longer than WORK_WAITS."""

    async def queue_lengths(self) -> dict[str, int]:
        """How many operations have not ended (`open`), are `running`, and how many `runs` take operations."""
