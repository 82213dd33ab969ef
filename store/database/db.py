"""The database: many short reads from any thread, and one writer thread that groups commits.

A transaction costs far more than the few rows in it, so the writer runs everything that is waiting in one
transaction and commits once. An idle writer commits as soon as a turn of the event loop brings nothing more, and while
it commits, and on PostgreSQL for a moment after it began, the next group gathers by itself. Each work of a group runs
in its own savepoint, so one that raises fails alone, and every caller is answered after the COMMIT that holds its rows.

Works of one kind may also run as one (`write_batched`): a statement for all of them instead of one for each.

On SQLite a commit survives kill -9; it survives a power cut only with `durable` (synchronous=FULL).
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, Protocol, TypeVar

from sqlalchemy import Connection, create_engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DataError, IntegrityError, InternalError, ProgrammingError
from sqlalchemy.orm import Session

from store.database import audit
from store.database.bulk import lock_first, make_few_trips
from store.database.caller import caller, enter
from store.database.commit_mark import CommitMark
from store.database.standby import tell_standbys
from store.database.wal import execute, prepare_sqlite
from store.database.works import (
    Batch,
    BatchFailed,
    Waiter,
    Work,
    batched,
    cause_of,
    is_lost,
    parts_of,
    run_alone,
    run_batch,
)

T = TypeVar("T")

#: How many works one transaction has: this bounds how long the first of a group waits for the last.
GROUP_SIZE = 256
#: With this many works, an event loop hands them to the writer without waiting for more.
ENOUGH = 32
#: The least time between the starts of two transactions of the writer on PostgreSQL, in seconds, unless ENOUGH works
#: wait.
APART_S = 0.004

#: How soon a PostgreSQL that disappeared silently (with its machine, or the network to it) is given up, in libpq's
#: words and units; otherwise a connection waits for a quarter of an hour, or for ever. The URL may set these, too.
GONE = {
    "connect_timeout": 5,
    "tcp_user_timeout": 15_000,
    "keepalives_idle": 5,
    "keepalives_interval": 5,
    "keepalives_count": 2,
}

#: Errors of the database about a wrong statement; nothing of its transaction is written.
WRONG = (IntegrityError, DataError, ProgrammingError, InternalError)


class Transactions(Protocol):
    """What asynchronous code may do with a database: the database itself, or a restricted form of it
    (`scheduler.cluster.fence`)."""

    def read(self) -> AbstractContextManager[Session]: ...

    async def write(self, work: Callable[[Session], T]) -> T: ...

    async def write_batched(self, batch: Batch, item: Any, *, lock: str) -> Any: ...


class Database:
    """One database, by URL: `sqlite:////abs/weft.db` or `postgresql+psycopg://...`."""

    def __init__(self, url: str, *, durable: bool = False) -> None:
        self.url = url
        parsed = make_url(url)
        sqlite = parsed.get_backend_name() == "sqlite"
        gone = {} if sqlite else {name: limit for name, limit in GONE.items() if name not in parsed.query}
        self._read_engine = create_engine(url, pool_size=8, max_overflow=56, hide_parameters=True, connect_args=gone)
        alone = {} if sqlite else {"isolation_level": "AUTOCOMMIT"}
        self._asking_engine = self._read_engine.execution_options(**alone)
        # the writer sends BEGIN itself, with its first statement
        begins = {} if sqlite else gone | {"autocommit": True}
        self._write_engine = create_engine(url, pool_size=1, max_overflow=0, hide_parameters=True, connect_args=begins)
        if sqlite:
            prepare_sqlite(self._read_engine, begin="BEGIN", durable=durable, query_only=True)
            prepare_sqlite(self._write_engine, begin="BEGIN IMMEDIATE", durable=durable, query_only=False)
        else:
            make_few_trips(self._write_engine)
            tell_standbys(self._write_engine)
        self._kept: Connection | None = None  # the writer's connection, between two groups
        self._mark = CommitMark.of(url)
        self._works: queue.SimpleQueue[list[Work] | None] = queue.SimpleQueue()
        # by event loop: works that it has not handed over yet
        self._turns: dict[asyncio.AbstractEventLoop, list[Work]] = {}
        self._apart_s, self._begun = 0.0 if sqlite else APART_S, 0.0
        self._closing = threading.Lock()
        self._closed = False
        self._writer = threading.Thread(target=self._write_groups, name="database-writer", daemon=True)
        self._writer.start()

    def refuse_lost_commits(self) -> None:
        """Raise LostCommits if the database is not in its newest state."""
        if self._mark is not None:
            self._mark.check()

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session for a short read, in any thread. It sees every write that was answered before it began."""
        with Session(self._read_engine, expire_on_commit=False, autoflush=False) as session:
            enter(session)
            yield session

    @contextmanager
    def ask(self) -> Iterator[Connection]:
        """A connection for the server's own queries, in any thread: on PostgreSQL without a transaction, so each is one
        round trip."""
        if caller().org_id is not None:
            raise RuntimeError("a request asks in a session, which shows the rows of its organisation alone")
        with self._asking_engine.connect() as connection:
            yield connection

    async def write(self, work: Callable[[Session], T], *, lock: str = "") -> T:
        """Run `work` in the writer thread and return what it returned, once that is committed. Its exception is
        raised here, with nothing of it written. Objects that it returns are detached but loaded. `work` must be short
        and do no I/O of its own: every other writer waits for it. On PostgreSQL nobody else has `lock`
        (`store.database.bulk.take_locks`) meanwhile, in any process."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._submit(Work(work, Waiter(future, loop), lock=lock))
        return await future

    async def write_batched(self, batch: Batch, item: Any, *, lock: str) -> Any:
        """Have `batch` do `item` together with the other items that wait for the same `batch`, as the server and not as
        a caller. Returns its result once that is committed. If `batch` raises, each item is done alone. On PostgreSQL
        nobody else has `lock` (`store.database.bulk.take_locks`) meanwhile, in any process."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._submit(batched(batch, item, lock, Waiter(future, loop)))
        return await future

    def write_now(self, work: Callable[[Session], T]) -> T:
        """`write` for a thread that may block: command line, start-up, tests."""
        if threading.current_thread() is self._writer:
            raise RuntimeError("write_now inside of a write would wait for itself: use the session you were given")
        future: Future[T] = Future()
        self._submit(Work(work, Waiter(future)))
        return future.result()

    def close(self) -> None:
        """Commit the waiting works, then refuse further ones."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            for works in self._turns.values():
                self._works.put(works)
            self._turns.clear()
            self._works.put(None)
        self._writer.join()
        if self._kept is not None:
            self._kept.close()
        if self._mark is not None:
            self._mark.close()
        self._read_engine.dispose()
        self._write_engine.dispose()

    def _submit(self, work: Work) -> None:
        """Queue a work. Those of consecutive turns of an event loop go to the writer together."""
        with self._closing:
            if self._closed:
                raise RuntimeError("the database is closed")
            loop = work.waiter.loop
            if loop is None:
                self._works.put([work])
                return
            of_turn = self._turns.setdefault(loop, [])
            of_turn.append(work)
        if len(of_turn) == 1:
            loop.call_soon(self._hand_over, loop, 0)

    def _hand_over(self, loop: asyncio.AbstractEventLoop, before: int) -> None:
        """Hand the works of an event loop to the writer; but if this turn has brought more than the `before` there
        were, wait for the next turn, which may bring more still."""
        with self._closing:
            works = self._turns.get(loop, [])  # empty if the database was closed meanwhile, which took them
            if before < len(works) < ENOUGH:
                loop.call_soon(self._hand_over, loop, len(works))
            elif works:
                self._works.put(self._turns.pop(loop))

    def _write_groups(self) -> None:
        over = False
        while not over:
            works, over = self._next_works()
            self._begun = time.monotonic()
            for start in range(0, len(works), GROUP_SIZE):
                group = works[start : start + GROUP_SIZE]
                _answer(group, self._commit(group))
                del group
            del works

    def _next_works(self) -> tuple[list[Work], bool]:
        """Wait for works, then take all that have gathered, up to about a group. The flag says that these are the last
        ones."""
        works: list[Work] = []
        while (more := self._works.get()) is not None:
            works += more
            left = self._begun + self._apart_s - time.monotonic()
            if len(works) < ENOUGH and left > 0 and self._works.empty():
                time.sleep(left)
            if len(works) >= GROUP_SIZE or self._works.empty():
                return works, False
        return works, True

    def _commit(self, group: list[Work]) -> BaseException | None:
        """Run and commit a group. A returned error is the transaction's, and so concerns every work in it."""
        parts = parts_of(group)
        if len(group) > 1 and all(works[0].batch is not None for works in parts):
            try:  # batches hardly ever fail: a savepoint for each would cost as much as the batches
                return self._commit_parts(group, parts, savepoints=False)
            except BatchFailed:  # nothing was written: forget their results, too
                for work in group:
                    work.result, work.error, work.noted = None, None, []
        return self._commit_parts(group, parts, savepoints=len(group) > 1)

    def _commit_parts(self, group: list[Work], parts: list[list[Work]], *, savepoints: bool) -> BaseException | None:
        """Run and commit the parts. Without `savepoints`, if one of several fails, it raises BatchFailed and has
        written nothing."""
        locks = sorted({work.lock for work in group if work.lock})
        batches = all(works[0].batch is not None for works in parts)
        try:
            with self._connection(group) as connection, connection.begin() as transaction:
                if locks:
                    lock_first(connection, locks, batches=batches)
                for works in parts:
                    if works[0].batch is not None:
                        run_batch(works[0].batch, works, connection, savepoint=savepoints, only=len(group) == 1)
                    else:
                        run_alone(works[0], connection, alone=not savepoints)
                    if works[0].error is not None and is_lost(connection):
                        raise works[0].error
                audit.seal(connection, [entry for work in group if work.error is None for entry in work.noted])
                count = None
                if transaction.is_active and all(work.error is not None for work in group):
                    transaction.rollback()
                elif self._mark is not None:
                    ((before,),) = execute(connection, "PRAGMA user_version")
                    count = self._mark.next(before)
                    execute(connection, f"PRAGMA user_version = {count}")
            if self._mark is not None and count is not None:
                with suppress(OSError):  # the file's count is then too low, which is harmless
                    self._mark.write(count)
        except BatchFailed:
            raise
        except BaseException as error:  # every caller must get an answer
            if isinstance(error, WRONG) and len(group) > 1 and not savepoints:
                raise BatchFailed from error  # statements of batches are sent with COMMIT, so one may fail only here
            return cause_of(error)
        return None

    @contextmanager
    def _connection(self, group: list[Work]) -> Iterator[Connection]:
        """The writer's connection. It is kept for the next group unless a work of this one failed: returning it to its
        pool and taking it out again costs as much as the rows of several operations."""
        connection, self._kept = self._kept or self._write_engine.connect(), None
        with ExitStack() as ends:
            ends.callback(connection.close)
            yield connection
            if all(work.error is None for work in group):
                self._kept = connection
                ends.pop_all()


def _answer(group: list[Work], error: BaseException | None) -> None:
    """Answer the callers of a group; all coroutines of an event loop by one call, which wakes it once."""
    loops: defaultdict[asyncio.AbstractEventLoop, list[Work]] = defaultdict(list)
    for work in group:
        if work.waiter.loop is not None:
            loops[work.waiter.loop].append(work)
        else:
            work.answer(error)
    for loop, works in loops.items():
        with suppress(RuntimeError):  # the loop has closed meanwhile: nobody is left to tell
            loop.call_soon_threadsafe(_answer_all, works, error)


def _answer_all(works: list[Work], error: BaseException | None) -> None:
    for work in works:
        work.answer(error)
