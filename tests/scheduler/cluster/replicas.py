"""Replicas in one process, on one PostgreSQL and one Redis, and the workers that tests play. Tests with the fixture
`play` run a scenario between two of them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime
from itertools import chain, repeat
from typing import Any

import numpy as np
from sqlalchemy import func, select
from weft.wire.binary.sample_codec import SequenceResult, encode_sample_response

from billing.prices import load_prices
from scheduler.cluster.answers import SampleAnswers
from scheduler.cluster.election import Leadership
from scheduler.cluster.shared_journal import SharedJournal
from scheduler.cluster.shared_limits import BacklogBoard
from scheduler.cluster.term import Shared
from scheduler.links.broadcasts import Broadcasts, Listener
from scheduler.links.loading import LoadingBoard
from scheduler.links.messages import Done, Pass, PassOver, PullPass, PullSamples, SampleWork
from scheduler.links.redis_queue import RedisQueue
from scheduler.links.sample_link import SampleLink
from scheduler.links.train_link import TrainerLink
from scheduler.order.operations import NewOperation, Outcome
from scheduler.order.plans import Sample
from store import tables
from store.blobs.folder import FolderBlobs
from store.database.db import Database
from tests.waiting import until_async

MOST_OPS, MOST_BYTES = 100, 10_000
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
#: An answer whose logprobs are recorded.
RECORDED = encode_sample_response([SequenceResult(np.array([7], np.int32), np.array([-1], np.float32), "stop")])


class Replica:
    def __init__(self, name: str, database: Database, blobs: FolderBlobs, url: str) -> None:
        self.threads = ThreadPoolExecutor(12)
        self.broadcasts, self.queue, self.board = Broadcasts(url), RedisQueue(url), BacklogBoard(url)
        self.loads = LoadingBoard(url)
        self.journal = SharedJournal(
            database,
            blobs,
            load_prices(),
            MOST_OPS,
            MOST_BYTES,
            name=name,
            queue=self.queue,
            broadcasts=self.broadcasts,
            board=self.board,
            loads=self.loads,
            threads=self.threads,
            waiting_of=lambda op_id: None,
        )
        self.answers = SampleAnswers(self.journal, self.queue, blobs, name)
        parts = (database, blobs, load_prices(), self.queue, self.broadcasts, self.threads, self.journal)
        self.leadership = Leadership(Shared(url, *parts, pass_tokens=100))
        loop = asyncio.get_running_loop()
        self.listener = Listener.of_ends(
            url,
            lambda ends, stamp: loop.call_soon_threadsafe(self.journal.heard, ends, stamp) and None,
            lambda: loop.call_soon_threadsafe(self.journal.missed) and None,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.listener.start()
        await asyncio.to_thread(self.listener.connected.wait, 10)
        works = (self.answers.settle, self.journal.look_after, self.journal.exchange_backlogs)
        tasks = [asyncio.create_task(work()) for work in works]
        try:
            yield
        finally:
            await self.leadership.stop(0.1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.journal.flush()
            self.listener.stop()

    def ended(self) -> None:
        self.listener.join()
        self.threads.shutdown()

    async def lead(self) -> None:
        self.leadership.start()
        await until_async(lambda: self.leadership.term is not None)

    async def result(self, request_id: str, within_s: float = 30) -> Any:
        found = await self.journal.outcome("org", request_id, within_s)
        return self.journal.answers.whole(found) if isinstance(found, Outcome) else found


Play = Callable[[Callable[[Replica, Replica], Awaitable[None]]], None]


def sample(seq: int, body: bytes = b"{}") -> NewOperation:
    plan = Sample(2, 5, "interactive")
    return NewOperation("org", "s", "s:sample:0", seq, "sample", "m", 20, body, plan)


@asynccontextmanager
async def generator(url: str, blobs: FolderBlobs, payloads: Iterable[bytes] = ()) -> AsyncIterator[list[str]]:
    """Answers every sample, the first ones with `payloads`; returns the ids of those it got."""
    answers = chain(payloads, repeat(b"tokens"))
    got: list[str] = []
    link = await asyncio.to_thread(SampleLink, url, blobs)

    def serve(over: threading.Event) -> None:
        link.send(PullSamples(["m"], 2))
        while not over.is_set():
            work = link.recv(0.05)
            if isinstance(work, SampleWork):
                for op in work.ops:
                    got.append(op.op_id)
                    payload, facts = next(answers), {"prefill": 5, "sample": 4}
                    link.send(Done(op.op_id, payload, facts, recorded=payload == RECORDED))
                link.send(PullSamples(["m"], 2))

    with closing(link):
        async with _beside(serve):
            yield got


@asynccontextmanager
async def trainer(url: str, blobs: FolderBlobs) -> AsyncIterator[list[tuple[int, bool]]]:
    """Answers every pass; returns (seq, replay) of all operations it was given, (-1, False) once its leader was
    gone."""
    given: list[tuple[int, bool]] = []

    def serve(over: threading.Event) -> None:
        while not over.is_set():
            steps = 0
            try:
                link = TrainerLink(url, blobs, over.is_set)
            except EOFError:
                return
            try:
                while not over.is_set():
                    link.send(PullPass(["m"]))
                    message = None
                    while message is None and not over.is_set():
                        message = link.recv(0.05)
                    if isinstance(message, Pass):
                        for op in message.ops:
                            given.append((op.seq, op.replay))
                            steps += op.kind == "optim_step"
                            facts = {"tokens": 10} if op.kind == "forward_backward" else {"version": steps}
                            if op.final and not op.replay:
                                link.send(Done(op.op_id, b"result", facts))
                        link.send(PassOver(message.pass_id, 10, 1, 0.01))
            except EOFError:
                given.append((-1, False))
            finally:
                link.close()

    async with _beside(serve):
        yield given


@asynccontextmanager
async def _beside(serve: Callable[[threading.Event], None]) -> AsyncIterator[None]:
    """`serve` runs in a thread until the block is over."""
    over = threading.Event()
    serving = asyncio.create_task(asyncio.to_thread(serve, over))
    try:
        yield
    finally:
        over.set()
        await serving


def count(database: Database, table: type[tables.Base]) -> int:
    with database.read() as session:
        return session.scalar(select(func.count()).select_from(table)) or 0
