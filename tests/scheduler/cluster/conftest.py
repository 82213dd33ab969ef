"""Both carriers of the fair queue, with a clock that tests move; and scenarios between two replicas."""

from __future__ import annotations

import asyncio
import traceback
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from scheduler.cluster import election, shared_journal, term
from scheduler.links.contract import FairQueue
from scheduler.links.redis_queue import RedisQueue
from scheduler.order.local_queue import LocalQueue
from store import tables
from store.blobs.folder import FolderBlobs
from store.database.db import Database
from tests.scheduler.cluster.replicas import Play, Replica
from tests.scheduler.journal.kit import organisation


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


Make = Callable[[Clock], FairQueue]


@pytest.fixture(params=["local", "redis"])
def make_queue(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes empty queues on one of the carriers."""
    if request.param == "local":
        yield LocalQueue
        return
    url, made = request.getfixturevalue("redis_url"), []

    def make(clock: Clock) -> FairQueue:
        made.append(RedisQueue(url, uuid.uuid4().hex, clock))
        return made[-1]

    yield make
    for queue in made:
        queue.close()


@pytest.fixture
def play(postgres_database: Database, blobs: FolderBlobs, url: str, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Run a scenario between two replicas, of which neither leads yet."""
    organisation(SimpleNamespace(database=postgres_database))  # type: ignore[arg-type]
    monkeypatch.setattr(term, "RESCAN_S", 0.2)
    for module in (term, election):
        monkeypatch.setattr(module, "BEAT_S", 0.2)
    monkeypatch.setattr(tables, "LEADS_S", 2.0)
    monkeypatch.setattr(shared_journal, "EXCHANGE_S", 0.1)

    def end(replicas: list[Replica]) -> None:
        """Stop everybody who waits in Redis for what will not come: each would wait for a second."""
        with redis.Redis.from_url(url) as client:
            for kind in ("normal", "pubsub"):
                client.client_kill_filter(_type=kind, skipme=True)
        for replica in replicas:
            replica.ended()

    def run(scenario: Callable[[Replica, Replica], Awaitable[None]]) -> None:
        async def both() -> None:
            async with AsyncExitStack() as stack:
                replicas = [Replica(name, postgres_database, blobs, url) for name in ("one", "two")]
                stack.callback(end, replicas)
                for replica in replicas:
                    await stack.enter_async_context(replica.running())
                await scenario(*replicas)

        asyncio.run(asyncio.wait_for(both(), 60))

    return run


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where an event loop asks the database: if that is frozen, the loop does nothing else, for any tenant."""
    found = list[str]()

    def noted(ask: Callable[[Database], Any]) -> Callable[[Database], Any]:
        def asking(self: Database) -> Any:
            with suppress(RuntimeError):
                asyncio.get_running_loop()
                found.append("".join(traceback.format_stack(limit=4)[:-1]))
            return ask(self)

        return asking

    for name in ("read", "ask"):
        monkeypatch.setattr(Database, name, noted(getattr(Database, name)))
    return found
