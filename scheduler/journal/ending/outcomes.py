"""Outcomes kept for the clients that will ask: the latest in memory, all of them as blobs, or in the rows of their
operations where they are small, until they are reaped.

Memory is bounded in number and in bytes, of all and of each organisation, so that large results of one neither fill it
nor push out those of others. What does not fit is read again from the database and the blobs."""

from __future__ import annotations

import logging
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from heapq import heapify, heappop, heapreplace

from scheduler.journal.rows import SMALL_BYTES, small_text
from scheduler.order.operations import SAMPLE, Gone, Operation, Outcome
from store import tables
from store.blobs.contract import Blobs, Damaged
from store.database.db import Transactions

log = logging.getLogger(__name__)

#: How many ended operations memory keeps for clients about to ask, and how many bytes of outcomes.
RECENT = 4096
RECENT_BYTES = 256 << 20
#: The share of these that one organisation may have.
RECENT_BYTES_PER_ORG = 32 << 20
#: A result larger than this that is not in memory is only read when there is room for it.
LARGE_BYTES = 65_536

JSON = "application/json"


def result_ref(op_id: str) -> str:
    """The ref of the blob in which an operation's result is kept."""
    return f"results/{op_id[:2]}/{op_id}"


def text_of(outcome: Outcome) -> str | None:
    """A result as the text in its operation's row (base64 unless it is JSON); None if it is a blob, and for a
    failure."""
    if outcome.error is not None or len(outcome.payload) > SMALL_BYTES:
        return None
    return small_text(outcome.payload) if outcome.content_type == JSON else b64encode(outcome.payload).decode()


def payload_of(text: str, content_type: str | None) -> bytes:
    """The payload of a result that is stored in its operation's row."""
    return text.encode() if content_type in (JSON, None) else b64decode(text)


class _Recent:
    """The latest ended operations. If a limit is exceeded, the oldest ones of the organisations with the most are
    dropped until a sixteenth of it is free: so all organisations are looked at only once for many results."""

    def __init__(self, most: int, most_bytes: int, most_bytes_per_org: int) -> None:
        self._most, self._most_bytes, self._most_bytes_per_org = most, most_bytes, most_bytes_per_org
        self._ops: dict[str, Operation] = {}
        # by organisation: ids and sizes, oldest first
        self._sizes: defaultdict[str, OrderedDict[str, int]] = defaultdict(OrderedDict)
        self.bytes_of: Counter[str] = Counter()
        self._bytes = 0  # of all organisations

    def __len__(self) -> int:
        return len(self._ops)

    def get(self, request_id: str) -> Operation | None:
        return self._ops.get(request_id)

    def add(self, op: Operation) -> None:
        self.discard(op)
        size = len(op.outcome.payload) + len(op.outcome.error or "") if op.outcome is not None else 0
        self._ops[op.id] = op
        self._sizes[op.org_id][op.id] = size
        self.bytes_of[op.org_id] += size
        self._bytes += size
        while self.bytes_of[op.org_id] > self._most_bytes_per_org:
            self._drop_oldest(op.org_id)
        if self._bytes > self._most_bytes:
            self._shrink(lambda: self._bytes, self.bytes_of.__getitem__, self._most_bytes)
        if len(self._ops) > self._most:
            self._shrink(lambda: len(self._ops), lambda org_id: len(self._sizes[org_id]), self._most)

    def discard(self, op: Operation) -> None:
        if self._ops.pop(op.id, None) is None:
            return
        size = self._sizes[op.org_id].pop(op.id)
        self.bytes_of[op.org_id] -= size
        self._bytes -= size
        if not self._sizes[op.org_id]:
            del self._sizes[op.org_id], self.bytes_of[op.org_id]

    def _shrink(self, total: Callable[[], int], of: Callable[[str], int], most: int) -> None:
        """Drop operations until a sixteenth of `most` is free of the `total`, to which each organisation adds `of`
        it."""
        largest = [(-of(org_id), org_id) for org_id in self._sizes]
        heapify(largest)
        while total() > most - most // 16:
            org_id = largest[0][1]
            self._drop_oldest(org_id)
            if org_id in self._sizes:
                heapreplace(largest, (-of(org_id), org_id))
            else:
                heappop(largest)

    def _drop_oldest(self, org_id: str) -> None:
        self.discard(self._ops[next(iter(self._sizes[org_id]))])


class Answers:
    def __init__(
        self,
        database: Transactions,
        blobs: Blobs,
        most: int = RECENT,
        most_bytes: int = RECENT_BYTES,
        most_bytes_per_org: int = RECENT_BYTES_PER_ORG,
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._limits = most, most_bytes, most_bytes_per_org
        self._recent = _Recent(*self._limits)

    def remember(self, op: Operation) -> None:
        """Keep the outcome of `op`."""
        self._recent.add(op)

    def recent(self, request_id: str) -> Operation | None:
        return self._recent.get(request_id)

    def found(self, org_id: str, request_id: str) -> Outcome | Gone | None:
        """An outcome that is no longer in memory; unless `whole`, a large one comes without its payload. None if this
        organisation has no such ended operation."""
        with self._database.read() as session:
            row = session.get(tables.Operation, request_id)
        if row is None or row.org_id != org_id or row.state == "queued":
            return None
        if row.error is not None:
            return Outcome(error=row.error, category=row.error_category or "server")
        if row.result is not None:
            return Outcome(payload_of(row.result, row.result_type), row.result_type or JSON)
        if row.result_ref is None:
            return Gone()
        found = Outcome(content_type=row.result_type or JSON, ref=row.result_ref, size_bytes=row.result_bytes or 0)
        return found if found.size_bytes > LARGE_BYTES else self.whole(found)

    def stored(self, org_id: str, request_id: str) -> Outcome | Gone | None:
        """As `found`, with the outcome's payload."""
        found = self.found(org_id, request_id)
        return self.whole(found) if isinstance(found, Outcome) else found

    def whole(self, found: Outcome) -> Outcome | Gone:
        """The outcome `found`, with its payload. A damaged file is given to nobody."""
        if not found.ref:
            return found
        try:
            return Outcome(self._blobs.get(found.ref), found.content_type)
        except FileNotFoundError:
            return Gone()
        except Damaged as error:
            log.error("the result %s: %s", found.ref, error)
            return Gone(
                "the result of this operation is damaged on the server's disk; what it did stands, and is billed"
            )

    def retrieved(self, org_id: str, request_ids: list[str]) -> list[str]:
        """The client has these results: drop them from memory. Returns the blobs to delete."""
        ended = [op for op in map(self._recent.get, request_ids) if op is not None and op.org_id == org_id]
        for op in ended:
            self._recent.discard(op)
        large = (op for op in ended if op.kind == SAMPLE and op.outcome is not None and text_of(op.outcome) is None)
        return [result_ref(op.id) for op in large]

    def clear(self) -> None:
        """Forget what is in memory; the store still has it."""
        self._recent = _Recent(*self._limits)
