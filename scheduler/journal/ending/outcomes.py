"""Outcomes kept for the clients that will ask: the latest in memory, all of them as blobs until they are reaped."""

from __future__ import annotations

import logging
from collections import OrderedDict

from scheduler.order.operations import SAMPLE, Gone, Operation, Outcome
from store import tables
from store.blobs import Blobs, Damaged
from store.db import Transactions

log = logging.getLogger(__name__)

#: Ended operations kept in memory for the client that is about to ask.
RECENT = 4096


def result_ref(op_id: str) -> str:
    """Where the result of an operation is kept."""
    return f"results/{op_id[:2]}/{op_id}"


class Answers:
    def __init__(self, database: Transactions, blobs: Blobs) -> None:
        self._database = database
        self._blobs = blobs
        self._recent: OrderedDict[str, Operation] = OrderedDict()

    def remember(self, op: Operation) -> None:
        """`op` has its outcome."""
        self._recent[op.id] = op
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)

    def recent(self, request_id: str) -> Operation | None:
        return self._recent.get(request_id)

    def stored(self, org_id: str, request_id: str) -> Outcome | Gone | None:
        """An outcome that is no longer in memory; None when this organisation has no such ended operation. One that is
        damaged on the disk is given to nobody."""
        with self._database.read() as session:
            row = session.get(tables.Operation, request_id)
        if row is None or row.org_id != org_id or row.state == "queued":
            return None
        if row.error is not None:
            return Outcome(error=row.error, category=row.error_category or "server")
        try:
            return Outcome(self._blobs.get(row.result_ref or ""), row.result_type or "application/json")
        except FileNotFoundError:
            return Gone()
        except Damaged as error:
            log.error("the result of operation %s: %s", request_id, error)
            return Gone(
                "the result of this operation is damaged on the server's disk; what it did stands, and is billed"
            )

    def retrieved(self, org_id: str, request_ids: list[str]) -> list[str]:
        """Their client has these results: forget them. Returns the blobs to delete."""
        ended = [op for op in map(self._recent.get, request_ids) if op is not None and op.org_id == org_id]
        for op in ended:
            del self._recent[op.id]
        return [result_ref(op.id) for op in ended if op.kind == SAMPLE]

    def clear(self) -> None:
        """Forget what is in memory; the store still has it."""
        self._recent.clear()
