"""The parts that every route works with, built once when the server starts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

from fastapi import Depends, Request
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool
from weft.wire import LimitsResponse

from api.checks.adapter_sizes import sizes_of
from api.checks.limits import limits_of
from api.state.afterwards import Afterwards
from api.state.arriving import LARGEST_IN_ALL, Arrival, Arriving
from api.state.failures import Failures, attempts, misses
from api.state.fetched import Fetched
from api.state.large_bodies import FOR_LONG_S, RESULTS_IN_HAND, SMALL_BYTES, LargeBodies, Pool
from api.state.last_used import LastUsed
from api.state.liveness import Liveness
from api.state.polls import LongPolls, most_connections
from api.state.rates import LocalRates, Rates
from api.state.remembered import Remembered
from api.state.telemetry import Telemetry
from api.state.threads import Threads
from api.who.lanes import Lane
from api.who.principal import Principal
from api.who.signing import Signer
from api.who.tokens import Tokens
from migrations.upgrade import revision_in
from store import tables
from store.blobs.contract import Blobs
from store.database.caller import caller
from store.database.db import Database
from store.people.secret import secret_of, server_secret
from store.settings import Settings
from workers.model.card import ModelCard

if TYPE_CHECKING:
    from api.oidc.flow import SigningIn
    from billing.prices import PriceList
    from scheduler.journal.ending.completions import FeedKey
    from scheduler.journal.front import OperationJournal
    from scheduler.order.light_work import SizesOf

T = TypeVar("T")
#: How many works of one organisation may be in threads at a time: reads of the database, files, calls of Stripe. There
#: are ten times as many threads.
WORKS_AT_ONCE = 4
#: How many large bodies and answers, of all organisations, are read or written at a time.
LARGE_AT_ONCE = 2
#: Longer than a healthy database takes, and shorter than probes wait.
WITHIN_S = 5.0


@dataclass(frozen=True, eq=False)
class ComingTurn:
    """The turns of a client's own session that are being sampled: their size counts against the quota before they are
    stored."""

    org_id: str
    size_bytes: int


class OneAtATime(Generic[T]):
    """Asks something that may never answer (a frozen database blocks every caller) at most once at a time, however many
    want to know, so that probes do not take all threads. Lives in the event loop."""

    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        self._ask = ask
        self._asking: asyncio.Future[T] | None = None

    async def __call__(self) -> T:
        """The answer. Raises TimeoutError if there is none within WITHIN_S, and the error of asking."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._ask())
        return await asyncio.wait_for(asyncio.shield(self._asking), WITHIN_S)


@dataclass(frozen=True)
class Service:
    settings: Settings
    cards: Mapping[str, ModelCard]
    database: Database
    blobs: Blobs
    prices: PriceList
    journal: OperationJournal
    #: Counts of what trainers and generators do.
    stats: Callable[[], dict[str, Any]]
    afterwards: Afterwards = field(default_factory=Afterwards)
    rates: Rates = field(default_factory=LocalRates)
    misses: Failures[Principal] = field(default_factory=misses)
    attempts: Failures[Request] = field(default_factory=attempts)
    threads: Threads = field(default_factory=lambda: Threads(WORKS_AT_ONCE))
    large: Threads = field(default_factory=lambda: Threads(1, LARGE_AT_ONCE))
    #: For answers that may be very long (curves, all checkpoints of a run), one of each organisation at a time: they
    #: keep the interpreter busy.
    long_reads: Threads = field(default_factory=lambda: Threads(1))
    turns_coming: set[ComingTurn] = field(default_factory=set)
    #: By feed: the task that reads what completed before the feed was followed.
    looks: dict[FeedKey, asyncio.Future[None]] = field(default_factory=dict)
    #: By sample: the requests that stream its tokens.
    readers: Counter[str] = field(default_factory=Counter)
    runs: Remembered[Lane[tables.Run]] = field(default_factory=Remembered)
    samplers: Remembered[Lane[tables.Sampler]] = field(default_factory=Remembered)

    @cached_property
    def polls(self) -> LongPolls:
        return LongPolls(most_connections(self.settings.front))

    @cached_property
    def limits(self) -> LimitsResponse:
        """The limits that clients are told, and that their requests are checked against."""
        return limits_of(self.cards, self.settings.limits)

    @cached_property
    def sizes(self) -> SizesOf:
        """The sizes of runs (`api.checks.adapter_sizes`)."""
        return sizes_of(self.cards)

    @cached_property
    def secret(self) -> bytes:
        given = self.settings.server_secret
        return server_secret(self.settings.data_dir) if given is None else secret_of(given.get_secret_value())

    @cached_property
    def signing_in(self) -> SigningIn | None:
        """Sign-in by the OpenID provider of the settings, if there is one. Its libraries are loaded only then."""
        if not self.settings.oidc.on:
            return None
        from api.oidc.flow import SigningIn

        return SigningIn(self.settings.oidc, self.secret)

    @cached_property
    def signer(self) -> Signer:
        return Signer(self.secret)

    @cached_property
    def tokens(self) -> Tokens:
        return Tokens(self.secret, self.settings.jwt_life_s)

    @cached_property
    def liveness(self) -> Liveness:
        return Liveness(self.database)

    @cached_property
    def last_used(self) -> LastUsed:
        return LastUsed(self.database)

    @cached_property
    def arriving(self) -> Arriving:
        return Arriving(LARGEST_IN_ALL * self.settings.limits.max_body_bytes)

    def arriving_body(self) -> Arrival:
        """A body that is being received, counted for its sender."""
        return self.arriving.body(_asking() or "")

    @cached_property
    def large_bodies(self) -> LargeBodies:
        return LargeBodies(self.settings.limits.max_body_bytes)

    @cached_property
    def results_in_hand(self) -> Pool:
        return Pool(RESULTS_IN_HAND * self.settings.limits.max_body_bytes)

    @cached_property
    def large_results(self) -> LargeBodies:
        return LargeBodies(self.settings.limits.max_body_bytes, what="results", pool=self.results_in_hand)

    @cached_property
    def large_answers(self) -> LargeBodies:
        """Room for large answers about samples that are already computed and billed: none is refused."""
        most, pool = self.settings.limits.max_body_bytes, self.results_in_hand
        return LargeBodies(most, wait_s=FOR_LONG_S, what="results", pool=pool)

    @cached_property
    def fetched(self) -> Fetched:
        return Fetched(self.database)

    @cached_property
    def revision(self) -> OneAtATime[str | None]:
        """The revision of the database's tables."""

        def read() -> str | None:
            with self.database.read() as session:
                return revision_in(session.connection())

        return OneAtATime(lambda: run_in_threadpool(read))

    @cached_property
    def telemetry(self) -> Telemetry:
        limits = self.settings.limits
        return Telemetry(self.settings.data_dir / "telemetry", limits.telemetry_bytes_per_day, limits.telemetry_days)

    async def read(self, work: Callable[[Session], T], turns: Threads | None = None) -> T:
        """Run a short read in a thread: a slow disk or database must not hold up the event loop. Each organisation has
        a few at a time, since a read may cover everything that it has; so has each address while it is not known who
        asks."""

        def run() -> T:
            with self.database.read() as session:
                return work(session)

        return await (turns or self.threads).run(_asking(), run)

    async def work(self, size_bytes: int, work: Callable[[], T]) -> T:
        """Read or write a body of that many bytes in a thread, in the organisation's turn."""
        return await (self.large if size_bytes > SMALL_BYTES else self.threads).run(_asking(), work)


def _asking() -> str | None:
    asks = caller()
    return asks.org_id or asks.ip


def service_of(request: Request) -> Service:
    service: Service = request.scope["app"].state.service
    return service


async def _service(request: Request) -> Service:
    """`service_of` for `Depends`, which would call a function that is not async in a thread."""
    return service_of(request)


ServiceDep = Annotated[Service, Depends(_service)]
