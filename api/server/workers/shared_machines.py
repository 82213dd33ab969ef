"""The running parts of one of several API replicas: what `EmbeddedMachines` are for the embedded
service. No workers are children of this process: they come to Redis (`weftd worker`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, ParamSpec

from api.checks.adapter_sizes import sizes_of
from billing.prices import PriceList
from scheduler.cluster.answers import SampleAnswers
from scheduler.cluster.election import Leadership
from scheduler.cluster.shared_journal import SharedJournal
from scheduler.cluster.shared_limits import BacklogBoard
from scheduler.cluster.term import STORE_WITHIN_S, Shared
from scheduler.links.broadcasts import Broadcasts, Listener
from scheduler.links.contract import QueueUnreachable
from scheduler.links.loading import LoadingBoard
from scheduler.links.redis_queue import RedisQueue
from scheduler.links.sample_link import worker_name
from scheduler.order.operations import Waiting
from store.blobs.contract import Blobs
from store.database.db import Database
from store.settings import Settings
from workers.model.card import ModelCard

P = ParamSpec("P")

#: Threads for calls to Redis and the database; a few of them always wait inside of a call to Redis.
THREADS = 24


class SharedMachines:
    """Built inside the event loop it lives in."""

    def __init__(
        self, settings: Settings, cards: dict[str, ModelCard], database: Database, blobs: Blobs, prices: PriceList
    ) -> None:
        self._settings = settings
        self._threads = ThreadPoolExecutor(THREADS, "carrier")
        self._broadcasts, self._queue = Broadcasts(settings.redis_url), RedisQueue(settings.redis_url)
        self._board, self._loads = BacklogBoard(settings.redis_url), LoadingBoard(settings.redis_url)
        limits, self._name = settings.limits, worker_name("api")
        self.journal = SharedJournal(
            database,
            blobs,
            prices,
            limits.max_queued_ops_per_org,
            limits.max_queued_bytes_per_org,
            name=self._name,
            queue=self._queue,
            broadcasts=self._broadcasts,
            board=self._board,
            loads=self._loads,
            threads=self._threads,
            waiting_of=self._waiting_of,
            limits=limits,
        )
        self._answers = SampleAnswers(self.journal, self._queue, blobs, self._name, self._leads)
        shared = Shared(
            settings.redis_url,
            database,
            blobs,
            prices,
            self._queue,
            self._broadcasts,
            self._threads,
            self.journal,
            settings.trainer.pass_tokens,
            settings.trainer.pass_limit_s,
            sizes_of(cards),
        )
        self._leadership = Leadership(shared)
        self._loop = asyncio.get_running_loop()
        told, streams = self._in_loop, self.journal.streams
        self._listener = Listener.of_ends(settings.redis_url, told(self.journal.heard), told(self.journal.missed))
        self._streams = Listener.of_streams(settings.redis_url, told(streams.heard), told(streams.missed))
        self.journal.reachable = self._listener.connected.is_set
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._listener.start()
        self._streams.start()
        self._leadership.start()
        works = (self._answers.settle, self.journal.look_after, self.journal.exchange_backlogs)
        self._tasks = [asyncio.create_task(work()) for work in works]

    async def ready(self) -> None:
        """Returns at once: workers come to Redis whenever they like."""

    def drain(self) -> None:
        """Accept nothing new here from now on."""
        self.journal.draining = True

    async def stop(self) -> None:
        self.drain()
        await self._leadership.stop(self._settings.drain_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.journal.stop(STORE_WITHIN_S)
        self._listener.stop()
        self._streams.stop()
        await asyncio.to_thread(self._threads.shutdown)
        with suppress(QueueUnreachable):
            self._board.leave(self._name)
        for client in (self._queue, self._broadcasts, self._board, self._loads):
            client.close()

    def stats(self) -> dict[str, Any]:
        term = self._leadership.term
        return {
            "trainer": {**(term.desk.report() if term is not None else {}), "loading": self._loading("trainer")},
            "generator": {
                **self.journal.generators,
                "replicas": self.journal.each_generator,
                "loading": self._loading("generator"),
            },
            "workers": [],
            "replica": {"name": self._name, "leads": self._leads(), "redis": self.journal.reachable()},
        }

    def processes(self) -> dict[str, int]:
        return {}

    def _loading(self, role: str) -> dict[str, float]:
        return {one.name: one.loading_s for one in self.journal.loading if one.role == role}

    def _leads(self) -> bool:
        return self._leadership.term is not None

    def _waiting_of(self, op_id: str) -> Waiting | None:
        term = self._leadership.term
        return term.journal.waiting(op_id) if term is not None else None

    def _in_loop(self, hear: Callable[P, None]) -> Callable[P, None]:
        """Makes `hear`, which runs in the event loop, callable from a listener's thread."""

        def told(*arguments: P.args, **_: P.kwargs) -> None:
            with suppress(RuntimeError):  # the loop was closed meanwhile
                self._loop.call_soon_threadsafe(hear, *arguments)

        return told
