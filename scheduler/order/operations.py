"""What an operation is, from the front's request to its outcome."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from scheduler.order.timings import Timings
from store import tables

SAMPLE = "sample"

#: What an operation is when nobody says otherwise (`scheduler.order.fair.PRIORITY_SHARES`).
INTERACTIVE = "interactive"


class SequenceReused(Exception):
    """The same (lane, seq) came with another operation. A permanent mistake of the client."""


class QueueFull(Exception):
    """The organisation has as many operations queued as it may have. Try again later."""


class Draining(Exception):
    """The server is about to stop and takes no new work. Try again later."""


class RunClosed(Exception):
    """The run takes no more operations. A permanent error."""


@dataclass(frozen=True)
class NewOperation:
    """What the front hands in. `lane` is a run id (ordered by seq) or, for samples, a sampler id (unordered).

    `plan` holds what its kind needs: `slices` [[start, stop, tokens], ...]; `spec`, `source_ref`, `with_optimizer`,
    `path` of a create or load; `kind`, `name`, `ttl_seconds`, `overwrite`, `user_metadata` of a named save;
    `sampler_id`, `sampling_session_seq_id`, `sampler_kind` of an unnamed one; `num_samples` of a sample;
    `priority` of a sample, or of a create for all its run.
    `sent` is what the client sent, where `body` is not that: repeats are known by it. `refused` says why the front
    turns an ordered operation away: it only spends its number, and fails with that."""

    org_id: str
    session_id: str
    lane: str
    seq: int
    kind: str
    base_model: str
    tokens: int
    body: bytes = b""
    plan: dict[str, Any] = field(default_factory=dict)
    refused: str | None = None
    sent: bytes | None = None
    key_id: int | None = None  # who asks, and the project that it counts for
    user_id: str | None = None
    project_id: str | None = None


@dataclass(frozen=True)
class Waiting:
    """Not finished yet, and why."""

    state: Literal["active", "paused_capacity"]
    reason: str


@dataclass(frozen=True)
class Gone:
    """It had a result, which is no longer there, and why."""

    why: str = "the result of this operation is no longer kept"


@dataclass(frozen=True)
class Outcome:
    """How an operation ended: a payload for its client, or an error (`category` is "user" or "server")."""

    payload: bytes = b""
    content_type: str = "application/json"
    error: str | None = None
    category: str = "server"


@dataclass(eq=False)
class Operation:
    """An accepted operation, from acceptance to its outcome."""

    id: str
    org_id: str
    session_id: str
    lane: str
    seq: int
    kind: str
    base_model: str
    tokens: int
    body_ref: str
    plan: dict[str, Any]
    accepted_at: datetime
    key_id: int | None = None
    user_id: str | None = None
    project_id: str | None = None
    body_bytes: int = 0
    running: bool = False
    settling: bool = False  # a worker has answered; a second answer changes nothing
    attempts: int = 0  # times a worker was lost while it ran, since it last got on
    reached: int = 0  # data that are known to be computed: a trainer lost after more of them is not its fault
    alone: bool = False  # a trainer was lost while it ran: it shares no pass any more
    body_sha256: str = ""  # of the stored body
    stuck: str = ""  # why its result cannot be stored yet
    charged: int = 0  # tokens that the fair order counts a sample as, until it ends
    outcome: Outcome | None = None
    timings: Timings = field(default_factory=Timings)
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def path(self) -> tuple[str, str, str, str]:
        """Where a sample is queued; the operations of a run are at its lane's path."""
        return (self.base_model, self.org_id, self.plan.get("priority", INTERACTIVE), self.lane)


def from_row(row: tables.Operation) -> Operation:
    """An operation that this process has not accepted itself."""
    return Operation(
        id=row.id,
        org_id=row.org_id,
        session_id=row.session_id,
        lane=row.lane,
        seq=row.seq,
        kind=row.kind,
        base_model=row.base_model,
        tokens=row.tokens,
        body_ref=row.body_ref,
        plan=row.plan,
        accepted_at=row.accepted_at,
        key_id=row.key_id,
        user_id=row.user_id,
        project_id=row.project_id,
        body_sha256=row.plan.get("stored_sha256", row.body_sha256) if row.body_ref else "",
    )
