"""The fair queue that several processes may share: what every carrier of it promises.

An item is known by its id from `push` to `forget`, and is in one of three places: waiting, in a worker's hands under a
lease, or answered. Pushing an id that is known changes nothing. `lease` takes items in fair order
(`scheduler.order.fair`); each gets an epoch, a number that only grows. `answer` succeeds only with the item's present
epoch: a worker that was given up and comes back can finish nothing twice. `decline` sets an item aside for other
workers; `lease` leaves one for a moment to a worker that suits it better. `expire` puts back what workers held that
were not heard of until their deadline, and tells what can only fail: items that were in the hands of `LIVES` workers
when they died, or that every worker has declined.

Nothing here is the truth: that is the database. A carrier that has lost everything is filled again from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

#: (base model, organisation, priority, lane); a lane is a run or a sampler.
Path = tuple[str, ...]


def flow_of(path: Path) -> Path:
    """What newcomers are counted by (`FairQueue.lease`): the path without its lane."""
    return path[:-1]


#: Priorities within an organisation, and how it divides its own share among those that have something to do.
PRIORITY_SHARES = {"interactive": 16, "batch": 1}

_ORGANISATION, _PRIORITY = 1, 2  # positions in a path

#: How often an item may be in a worker's hands when that worker dies before it is given up.
LIVES = 3
#: How many items of one model may be set aside before no more are handed out: each keeps its place in the fair order.
MAX_ASIDE = 256
#: How much fuller a worker may be and still be preferred because it holds the adapter, as a share of its slots.
HEAD_START = 0.25
#: For how long an item is left to the worker that holds its adapter, before any worker may take it.
LEFT_S = 0.05
#: The longest credible deadline of a worker, in seconds from now. A later one was set by a clock that ran ahead, and is
#: cut to this.
AHEAD_S = 60.0
#: How many adapters are remembered of one worker; those used longest ago are forgotten.
REMEMBERED = 1024
#: How long a consumer may keep an answer that it has taken without forgetting the item. Beyond it, the consumer is
#: taken for dead.
TAKEN_S = 15.0


def weights_of(path: Path, organisation: int) -> list[int]:
    """The weight of each flow on a path; `organisation` is the weight of its organisation."""
    weights = [1] * len(path)
    if len(path) > _PRIORITY:
        weights[_PRIORITY] = PRIORITY_SHARES.get(path[_PRIORITY], 1)
    if len(path) > _ORGANISATION:
        weights[_ORGANISATION] = max(1, organisation)
    return weights


class QueueUnreachable(Exception):
    """The carrier does not answer. What is durable is unharmed; try again later."""


@dataclass(frozen=True)
class Item:
    """`cost` is in tokens, `slots` how many sequences of a generator it takes. `body` says where the work is. A worker
    that has had an item of the same `adapter` holds those weights in memory; "" needs none. `op` comes back with the
    answer, for whoever settles it (`scheduler.journal.rows.pack`)."""

    id: str
    path: Path
    cost: int
    body: bytes = b""
    slots: int = 1
    weight: int = 1  # the fair share of its organisation
    adapter: str = ""
    op: bytes = b""


@dataclass(frozen=True)
class Lease:
    id: str
    path: Path
    body: bytes
    epoch: int


@dataclass(frozen=True)
class Answered:
    """An item that a worker has finished; it was leased at `leased_at` (seconds of the carrier's clock). `receipt` is
    the carrier's own, `cost` the item's charge, `op` the item's `op`."""

    id: str
    result: bytes
    cost: int
    leased_at: float
    receipt: str
    op: bytes = b""


@dataclass(frozen=True)
class Expired:
    """`back` were queued again. `given_up`, and `declined` with its reasons, are reported until they are forgotten."""

    back: list[str] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    declined: list[tuple[str, list[str]]] = field(default_factory=list)


class FairQueue(Protocol):
    """Times are seconds; every call is atomic. Raises QueueUnreachable."""

    def push(self, item: Item) -> bool:
        """Queue an item at the end of its path. False if its id is known already."""

    def correct(self, path: Path, tokens: int) -> None:
        """Correct the charge of what was served from `path`: it used `tokens` more than it was charged (fewer, if
        negative)."""

    def peek(self, prefix: Path = ()) -> str | None:
        """The id of the next item at or below `prefix`."""

    def remove(self, item_id: str) -> bool:
        """Forget a queued item. False if it is not queued: a worker holds it, or it has ended."""

    def ahead(self, item_id: str) -> int | None:
        """About how many items are served before this one; None if it is not queued."""

    def lease(
        self, worker: str, models: Sequence[str], slots: int, ttl_s: float, most: int | None = None, yields: int = 0
    ) -> list[Lease]:
        """The fairest items of these models until `slots` are filled; the last may exceed them. They are this
        worker's until `ttl_s` have passed without a sign of life. `most` items at most: with 0 it only says that it is
        there, which models it serves and how many slots it has free.

        An item whose adapter this worker does not hold is left to one that does, has slots free and is at most
        HEAD_START fuller: it is served, for the fair order, but set aside for that worker, which is woken and gets it
        before anything else. LEFT_S later it is anybody's. Items leased by a call whose reply was lost come with the
        next call.

        Without a free slot, here or at another worker of the model, the next in order still comes as long as its flow
        (its organisation's of that priority) has nothing in any worker's hands: up to `yields` slots, for which the
        worker will set others' work aside.
        """

    def renew(self, worker: str, ttl_s: float) -> bool:
        """A sign of life. False if the worker was given up: it holds nothing any more."""

    def holder(self, item_id: str) -> str | None:
        """The worker that holds the item."""

    def answer(self, item_id: str, epoch: int, result: bytes) -> bool:
        """The worker that holds the item under that epoch has finished it. For any other epoch: False, and nothing
        changes."""

    def lose(self, item_id: str, epoch: int) -> bool:
        """The worker that holds the item under that epoch is alive but has lost its work on it. The item is treated as
        if that worker had died. For any other epoch: False, and nothing changes."""

    def decline(self, item_id: str, epoch: int, why: str) -> list[str] | None:
        """The holder of that epoch cannot serve it. It is set aside for those workers of its model that have not
        declined it, which get it before what is queued: []. If there are none, it stays the holder's, to answer with
        what all have said. None, and nothing changes, for anybody else."""

    def answered(self, consumer: str, timeout_s: float) -> list[Answered]:
        """Answered items, each given to one consumer; given to another one if the first does not forget it in time."""

    def forget(self, item_id: str, receipt: str = "") -> None:
        """Forget an item that has ended for good."""

    def expire(self) -> Expired:
        """Put back the items of workers whose time is over."""

    def known(self, item_ids: Sequence[str]) -> set[str]:
        """The items among these that the carrier has, in any of its places."""
