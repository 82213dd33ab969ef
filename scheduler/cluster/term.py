"""The replica that leads: it owns the runs. Their lanes, the composition of passes and the trainer's desk are the same
code as in the embedded service; what is accepted elsewhere comes in by `Broadcasts`, trainers by `train_link`.

A new leader rebuilds the journal of runs from the database, as a restarted server does, and its trainer rebuilds the
runs by replay. It also looks after the shared queue: puts back what dead generators held, and queues again what the
database knows and Redis does not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import select, tuple_

from billing.prices import PriceList
from scheduler.cluster.fence import Fenced, Superseded
from scheduler.cluster.leading_journal import LeadingJournal
from scheduler.cluster.policy_desk import PolicyDesk
from scheduler.cluster.shared_journal import SharedJournal
from scheduler.cluster.stored import QueuedSample
from scheduler.dispatch.trainer_desk import TrainerDesk
from scheduler.journal.left import open_runs
from scheduler.journal.samples.sampling import GAVE_UP
from scheduler.journal.storing import logged
from scheduler.links.broadcasts import MOST_AT_ONCE, Accepted, Broadcasts
from scheduler.links.contract import QueueUnreachable
from scheduler.links.loading import longest
from scheduler.links.messages import Done, Failure
from scheduler.links.policies import PolicyBoard
from scheduler.links.redis_queue import RedisQueue
from scheduler.links.train_link import Joining, LeaderLink
from scheduler.order.light_work import SizesOf, unknown_sizes
from scheduler.order.operations import SAMPLE
from store import tables
from store.blobs.contract import Blobs
from store.database.bulk import among
from store.database.db import Database

log = logging.getLogger(__name__)

BEAT_S = 1.0
#: How long the end of a term waits for what is being stored; the rest is done again by the next leader.
STORE_WITHIN_S = 5.0
#: How often the leader looks for operations that are accepted in the database and queued nowhere.
RESCAN_S = 2.0
#: The most samples that one look reads and queues again.
RESCAN_ROWS = 2000

_OP = tables.Operation.__table__
_OF_RUNS = {dialect: select(_OP).where(one, _OP.c.kind != SAMPLE) for dialect, one in among(_OP.c.id, "ids").items()}


@dataclass(frozen=True)
class Shared:
    """The connections, stores, prices and journal that all parts of one replica share."""

    url: str
    database: Database
    blobs: Blobs
    prices: PriceList
    queue: RedisQueue
    broadcasts: Broadcasts
    threads: Executor
    journal: SharedJournal
    pass_tokens: int
    pass_limit_s: float = 0.0
    sizes: SizesOf = unknown_sizes


class Term:
    """One replica's time of leading, from its election to its end."""

    def __init__(self, shared: Shared, token: str) -> None:
        self.token = token
        self._shared = shared
        self._run = shared.journal.run
        self.database = Fenced(shared.database, token)
        replica = shared.journal
        self.journal = LeadingJournal(
            self.database, shared.blobs, shared.prices, replica.meters, replica.announce, shared.sizes, self._failed
        )
        self._board = PolicyBoard(shared.url)
        self.desk = TrainerDesk(
            self.journal.training,
            shared.pass_tokens,
            shared.pass_limit_s,
            loading_s=lambda base_model: longest(replica.loading, "trainer", base_model),
        )
        self._policies = PolicyDesk(self.journal.training, self._board, self._run)
        self._joining = Joining(shared.url, token)
        self._tasks: list[asyncio.Task[None]] = []
        self._draining = False
        self._sure_until = 0.0
        self.renewed()
        self.over = asyncio.Event()
        self._serving: set[asyncio.Task[None]] = set()  # one task for each trainer's link
        self._waiting: list[QueuedSample] = []  # samples that the last look found queued in the database

    async def begin(self) -> None:
        await self.journal.recover(self._run)
        await self._shared.journal.tell_again(await self._run(self._lately))
        works = (self._lead, self._trainers, self._hear, self._rescan, self._expire, self._policies.tell)
        self._tasks = [asyncio.create_task(self._keep(work)) for work in works]

    async def end(self) -> None:
        """End the term. The trainers' links are closed last, after their results are stored: what they still hold then
        is no suspect in their loss."""
        for task in self._tasks:
            task.cancel()
        await self.journal.stop(STORE_WITHIN_S)
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._serving, return_exceptions=True)
        await self._run(self._joining.close)
        self._board.close()

    def drain(self) -> None:
        """Have the trainers snapshot their runs; they then look for the next leader."""
        self._draining = True
        self.desk.drain()

    async def drained(self, within_s: float) -> None:
        """Wait until the trainers have said goodbye and all that they sent is settled, at most `within_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                if self._serving:
                    await asyncio.wait(self._serving)
                await self.journal.training.flush()

    def _failed(self, error: BaseException) -> None:
        """Work in the background has failed. If that is because another replica leads, the term is over."""
        if isinstance(error, Superseded):
            self.over.set()
        else:
            logged(error)

    async def _keep(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do `work` again and again. If it finds that another replica leads, the term is over."""
        while True:
            try:
                await work()
            except Superseded:
                self.over.set()
                return
            except QueueUnreachable:
                await asyncio.sleep(BEAT_S)
            except Exception:
                log.exception("leading: trying again")
                await asyncio.sleep(BEAT_S)

    def renewed(self) -> None:
        """Note that the lease has just been renewed: this replica leads for LEADS_S from now."""
        self._sure_until = asyncio.get_running_loop().time() + tables.LEADS_S

    async def _lead(self) -> None:
        """Tell trainers to come here, unless the lease may have run out."""
        if not self._draining and asyncio.get_running_loop().time() < self._sure_until:
            await self._run(self._joining.lead, tables.LEADS_S)
        await asyncio.sleep(BEAT_S)

    async def _trainers(self) -> None:
        """Serve the next trainer that joins, in a task of its own."""
        name = await self._run(self._joining.next, 1.0)
        if name is not None and not self._draining:
            task = asyncio.create_task(self._serve(name))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _serve(self, name: str) -> None:
        log.info("%s attached", name)
        link = LeaderLink(self._shared.url, name, self._shared.blobs)
        try:
            await self.desk.serve(link, name)
        except Superseded:
            self.over.set()
        except Exception:
            log.exception("the link to %s failed", name)
        finally:
            link.close()
        log.info("%s is gone", name)

    async def _hear(self) -> None:
        notes: list[Accepted] = await self._run(self._shared.broadcasts.next_accepted, 1.0)
        for note in notes:  # failures first: a step that follows one may be among the accepted operations
            if note.told is not None:
                self.journal.training.told(note.told)
        await self._take_in([note.op_id for note in notes if note.op_id and not self.journal.hear(note.packed)])
        for note in notes:
            if note.closed_run:
                self.journal.training.close_run(note.closed_run)

    async def _take_in(self, op_ids: list[str]) -> None:
        rows = await self._run(self._rows, op_ids) if op_ids else []
        unknown = {row.lane for row in rows} - self.journal.training.runs.keys()
        logs = await self._run(self.journal.logs_of, unknown) if unknown else {}
        closed = [op for row in rows if (op := self.journal.take_in(row, logs)) is not None]
        for op in closed:
            failure = Failure(f"run {op.lane} was closed before this operation reached it", "user")
            await self._shared.journal.end(op, Done(op.id, failure=failure))

    def _rows(self, op_ids: list[str]) -> list[Any]:
        """Rows of operations of runs, by run and number. Plain rows, because there may be many."""
        found = list[Any]()
        with self.database.read() as session:
            connection = session.connection()
            for start in range(0, len(op_ids), MOST_AT_ONCE):
                ids = {"ids": op_ids[start : start + MOST_AT_ONCE]}
                found += connection.execute(_OF_RUNS[connection.dialect.name], ids)
        return sorted(found, key=lambda one: (one.lane, one.seq))

    async def _rescan(self) -> None:
        """Take in what the database has and no message told of."""
        missing, samples, closed = await self._run(self._look)
        await self._take_in([op_id for op_id in missing if self.journal.training.opened(op_id) is None])
        for run_id in closed:
            self.journal.training.close_run(run_id)
        waiting, self._waiting = {op_id for _, op_id in self._waiting}, samples
        if waiting:  # only samples that the last look already found: the newest are still on their way
            known = await self._run(self._shared.queue.known, sorted(waiting))
            await self._push_again(waiting - known)
        await asyncio.sleep(RESCAN_S)

    async def _push_again(self, lost: set[str]) -> None:
        """Queue again samples that the shared queue has lost, the oldest first."""
        if lost:
            rows = await self._run(self._shared.journal.stored.all_queued, sorted(lost))
            await self._shared.journal.push(sorted(rows.values(), key=lambda op: op.accepted_at))

    def _lately(self) -> list[tables.Operation]:
        """Operations that the last leader may have settled without telling anyone."""
        row, since = tables.Operation, datetime.now(UTC) - timedelta(seconds=2 * tables.LEADS_S + 10)
        with self.database.read() as session:
            return list(session.scalars(select(row).where(row.finished_at > since).limit(RESCAN_ROWS)))

    def _look(self) -> tuple[list[str], list[QueuedSample], list[str]]:
        """Read from the database: operations of runs that may not have arrived, queued samples, and runs whose session
        has ended. If there are more samples than one look may read, the next look goes on after the last one: lost
        samples may stand behind others that wait long, for a model that nobody serves."""
        self.journal.reweigh()
        row = tables.Operation
        gaps = self.journal.gaps()
        lanes = dict(self.journal.training.runs)
        with self.database.read() as session:
            queued = select(row.id).where(row.state == "queued", row.kind != SAMPLE)
            missing = list(session.scalars(queued.order_by(row.lane, row.seq)))
            for start in range(0, len(gaps), MOST_AT_ONCE):
                of_gaps = tuple_(row.lane, row.seq).in_(gaps[start : start + MOST_AT_ONCE])
                missing += session.scalars(select(row.id).where(of_gaps, row.state == "failed"))
            closed = [run_id for run_id in open_runs(session) if run_id in lanes and not lanes[run_id].closing]
        after = self._waiting[-1] if len(self._waiting) == RESCAN_ROWS else None
        return missing, self._shared.journal.stored.queued_samples(after, RESCAN_ROWS), closed

    async def _expire(self) -> None:
        expired = await self._run(self._shared.queue.expire)
        if expired.back or expired.given_up:
            await self._run(self._shared.broadcasts.count, {"lost": 1})
            log.warning("%d samples were in the hands of a generator that is gone", len(expired.back))
        for op_id in expired.given_up:
            await self._fail(op_id, Failure(GAVE_UP))
        for op_id, reasons in expired.declined:
            await self._fail(op_id, Failure("; ".join(reasons), "user"))
        await asyncio.sleep(BEAT_S)

    async def _fail(self, op_id: str, failure: Failure) -> None:
        op = await self._run(self._shared.journal.stored.queued, op_id)
        if op is not None:
            await self._shared.journal.end(op, Done(op_id, failure=failure))
        await self._run(self._shared.queue.forget, op_id)
