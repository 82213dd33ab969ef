"""What an operation is, from the front's request to its outcome."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

import msgspec

from scheduler.links.messages import SAVES
from scheduler.order.plans import BODY_ONLY, Plan, Sample
from scheduler.order.timings import Timings
from store.tracing import request_of

SAMPLE = "sample"
#: Numbers from here on belong to samples whose results only one connection can read (`api.routes.openai`).
UNKEPT = 2**62 + 2**61

#: The priority of an operation when nobody says otherwise (`scheduler.links.contract.PRIORITY_SHARES`).
INTERACTIVE = "interactive"


class SequenceReused(Exception):
    """The same (lane, seq) came with another operation. A permanent mistake of the client."""


class QueueFull(Exception):
    """The organisation has as many operations queued as it may have. Try again later."""


class Draining(Exception):
    """The server is about to stop and takes no new work. Try again later."""


class RunClosed(Exception):
    """The run takes no more operations. A permanent error."""


class NewOperation(msgspec.Struct, frozen=True):
    """What the front hands in.

    `lane` is a run id (ordered by `seq`) or, for samples, a sampler id (unordered). `kind` is an OpKind or SAMPLE.
    `tokens` are the most that it can use, which is what rate limits, the hold on money and the fair order count: all
    tokens of the data for a forward or forward_backward; the prompt and `max_tokens` for each sequence for a sample;
    else 0. `stores_bytes` is about what a save will store. `body` is what a worker reads; `sent` is what the client
    sent, if that differs: repeats are recognised by it. `refused` is why the API refuses an ordered operation: it only
    spends its number, and fails with that error.
    """

    org_id: str
    session_id: str
    lane: str
    seq: int
    kind: str
    base_model: str
    tokens: int
    body: bytes = b""
    plan: Plan = BODY_ONLY
    refused: str | None = None
    sent: bytes | None = None
    key_id: int | None = None  # who asks, and the project that it is counted for
    user_id: str | None = None
    project_id: str | None = None
    stores_bytes: int = 0


@dataclass(frozen=True)
class Waiting:
    """Not finished yet, and why. `unserved`: no worker has, or loads, its base model (`scheduler.order.presence`)."""

    state: Literal["active", "paused_capacity"]
    reason: str
    unserved: bool = False


@dataclass(frozen=True)
class Gone:
    """The operation had a result that is no longer kept; `why`."""

    why: str = "the result of this operation is no longer kept"


@dataclass(frozen=True)
class Outcome:
    """How an operation ended: a payload for its client, or an error (`category` is "user" or "server"). If a large
    payload is not in memory, `ref` names its blob of `size_bytes`."""

    payload: bytes = b""
    content_type: str = "application/json"
    error: str | None = None
    category: str = "server"
    ref: str = ""
    size_bytes: int = 0


@dataclass(eq=False)
class Operation:
    """An accepted operation, from acceptance to its outcome. Fields that a NewOperation has too mean the same.

    The body: `body` if it is small, else `body_ref` names its blob; both are empty for none. `body_bytes` is its
    length, which counts as queued, and `body_sha256` its digest as hex. `origin` is the HTTP request that brought it
    (`store.tracing.origin_here`).

    Workers that were lost while they computed it: `attempts` counts them; `reached` is how many of its data were
    computed in passes that ended, and getting further sets `attempts` to 0; `alone` says that a trainer was lost over
    it, so that it shares no pass any more.

    Its end: `settling` says that a worker has answered, and a second answer changes nothing; `stuck` why its result
    cannot be stored yet. `charged` are the tokens that the fair order counts a sample as until it ends
    (`scheduler.order.expected_cost`)."""

    id: str
    org_id: str
    session_id: str
    lane: str
    seq: int
    kind: str
    base_model: str
    tokens: int
    body_ref: str
    plan: Plan
    accepted_at: datetime
    key_id: int | None = None
    user_id: str | None = None
    project_id: str | None = None
    body: bytes = b""
    body_bytes: int = 0
    stores_bytes: int = 0
    running: bool = False
    settling: bool = False
    attempts: int = 0
    reached: int = 0
    alone: bool = False
    body_sha256: str = ""
    origin: str = ""
    stuck: str = ""
    charged: int = 0
    outcome: Outcome | None = None
    timings: Timings = field(default_factory=Timings)
    _over: bool = False
    _waiting: list[asyncio.Future[bool]] = field(default_factory=list)

    def end(self) -> None:
        """Note that the operation has its outcome, here or elsewhere, and wake whoever waits for it."""
        self._over = True
        for waiter in self._waiting:
            _tell(waiter, True)

    async def ends_within(self, timeout_s: float) -> bool:
        """Wait for the operation's end. False if it has not ended within `timeout_s`."""
        if self._over:
            return True
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        late = loop.call_later(timeout_s, _tell, waiter, False)
        self._waiting.append(waiter)
        try:
            return await waiter
        finally:
            late.cancel()
            self._waiting.remove(waiter)

    @property
    def path(self) -> tuple[str, str, str, str]:
        """The path at which a sample is queued; operations of a run are queued at their lane's path."""
        return (self.base_model, self.org_id, self.sample.priority, self.lane)

    @property
    def run_id(self) -> str:
        """The run that the operation belongs to; "" for a sample."""
        return self.lane if self.kind != SAMPLE else ""

    @property
    def facts(self) -> dict[str, str]:
        """The operation's fields for log lines (`store.logs`)."""
        return {"request": request_of(self.origin), "org": self.org_id, "run": self.run_id, "operation": self.id}

    @property
    def sample(self) -> Sample:
        """The plan of a sample."""
        assert isinstance(self.plan, Sample), f"{self.kind} {self.id} is no sample"
        return self.plan

    @property
    def target_ref(self) -> str:
        """The folder that a save writes its weights to; "" for everything else."""
        return f"weights/{self.id}" if self.kind in SAVES else ""


def _tell(waiter: asyncio.Future[bool], over: bool) -> None:
    if not waiter.done():
        waiter.set_result(over)
