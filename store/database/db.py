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
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from sqlalchemy import Connection, create_engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DataError, IntegrityError, InternalError, ProgrammingError
from sqlalchemy.orm import Session

from store.database import audit
from store.database.bulk import lock_first, make_few_trips, send_now
from store.database.caller import caller, enter, lift
from store.database.commit_mark import CommitMark
from store.database.wal import execute, prepare_sqlite

T = TypeVar("T")

#: Works in one transaction at most: it bounds how long the first of a group waits for the last.
GROUP_SIZE = 256
#: With so many works, an event loop waits for no more before it hands them to the writer.
ENOUGH = 32
#: Between the beginnings of two transactions of the writer on PostgreSQL, in seconds, unless ENOUGH wait.
APART_S = 0.004

#: What a database says of a statement that is wrong; nothing of its transaction is so.
WRONG = (IntegrityError, DataError, ProgrammingError, InternalError)


@dataclass
class _Waiting:
    """Who waits for a work, told after the commit (or the failure): a coroutine, in its event loop, or a thread. A
    coroutine may have been cancelled since: the write happens all the same."""

    future: Future[Any] | asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop | None = None

    def resolve(self, result: Any, error: BaseException | None) -> None:
        if self.loop is not None and self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


#: Does many items as one work. Returns for each its result, or the exception that it alone fails with.
Batch = Callable[[Session, list[Any]], list[Any]]


@dataclass
class _Work:
    """Something to run in the writer; with `batch`, an item to run together with the others of that batch."""

    run: Callable[[Session], Any]
    waiting: _Waiting
    batch: Batch | None = None
    item: Any = None
    lock: str = ""
    context: Context = field(default_factory=copy_context)  # the work runs as its caller
    noted: list[dict[str, Any]] = field(default_factory=list)  # for the audit log
    result: Any = None
    error: BaseException | None = field(default=None)

    def answer(self, error: BaseException | None = None) -> None:
        self.waiting.resolve(self.result, self.error or error)


class Transactions(Protocol):
    """What asynchronous code may do with a database: it, or what some may do of it (`scheduler.cluster.fence`)."""

    def read(self) -> AbstractContextManager[Session]: ...

    async def write(self, work: Callable[[Session], T]) -> T: ...

    async def write_batched(self, batch: Batch, item: Any, *, lock: str) -> Any: ...


class Database:
    """One database, by URL: `sqlite:////abs/weft.db` or `postgresql+psycopg://...`."""

    def __init__(self, url: str, *, durable: bool = False) -> None:
        self.url = url
        sqlite = make_url(url).get_backend_name() == "sqlite"
        self._read_engine = create_engine(url, pool_size=8, max_overflow=56, hide_parameters=True)
        alone = {} if sqlite else {"isolation_level": "AUTOCOMMIT"}
        self._asking_engine = self._read_engine.execution_options(**alone)
        begins = {} if sqlite else {"autocommit": True}  # the writer sends BEGIN itself, with what comes first
        self._write_engine = create_engine(url, pool_size=1, max_overflow=0, hide_parameters=True, connect_args=begins)
        if sqlite:
            prepare_sqlite(self._read_engine, begin="BEGIN", durable=durable, query_only=True)
            prepare_sqlite(self._write_engine, begin="BEGIN IMMEDIATE", durable=durable, query_only=False)
        else:
            make_few_trips(self._write_engine)
        self._mark = CommitMark.of(url)
        self._works: queue.SimpleQueue[list[_Work] | None] = queue.SimpleQueue()
        self._turns: dict[asyncio.AbstractEventLoop, list[_Work]] = {}  # works that each has not handed over
        self._apart_s, self._begun = 0.0 if sqlite else APART_S, 0.0
        self._closing = threading.Lock()
        self._closed = False
        self._writer = threading.Thread(target=self._write_groups, name="database-writer", daemon=True)
        self._writer.start()

    def refuse_lost_commits(self) -> None:
        """Raise LostCommits when this is not the newest state that the database has had."""
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
        """For the server's own questions, in any thread: on PostgreSQL without a transaction, so each is one trip."""
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
        self._submit(_Work(work, _Waiting(future, loop), lock=lock))
        return await future

    async def write_batched(self, batch: Batch, item: Any, *, lock: str) -> Any:
        """Have `batch` do `item`, together with the other items that are waiting for the same `batch`, as the server
        and for nobody in particular; return its result once that is committed. When `batch` raises, each item is done
        alone. On PostgreSQL nobody else has `lock` (`store.database.bulk.take_locks`) meanwhile, in any process."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._submit(_batched(batch, item, lock, _Waiting(future, loop)))
        return await future

    def write_batched_now(self, batch: Batch, item: Any, *, lock: str) -> Any:
        """`write_batched` for a thread that may block."""
        future: Future[Any] = Future()
        self._submit(_batched(batch, item, lock, _Waiting(future)))
        return future.result()

    def write_now(self, work: Callable[[Session], T]) -> T:
        """`write` for a thread that may block: command line, start-up, tests."""
        if threading.current_thread() is self._writer:
            raise RuntimeError("write_now inside of a write would wait for itself: use the session you were given")
        future: Future[T] = Future()
        self._submit(_Work(work, _Waiting(future)))
        return future.result()

    def close(self) -> None:
        """Commit what is waiting, then refuse more."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            for works in self._turns.values():
                self._works.put(works)
            self._turns.clear()
            self._works.put(None)
        self._writer.join()
        if self._mark is not None:
            self._mark.close()
        self._read_engine.dispose()
        self._write_engine.dispose()

    def _submit(self, work: _Work) -> None:
        """What comes in turns of an event loop that follow each other goes to the writer together."""
        with self._closing:
            if self._closed:
                raise RuntimeError("the database is closed")
            loop = work.waiting.loop
            if loop is None:
                self._works.put([work])
                return
            of_turn = self._turns.setdefault(loop, [])
            of_turn.append(work)
        if len(of_turn) == 1:
            loop.call_soon(self._hand_over, loop, 0)

    def _hand_over(self, loop: asyncio.AbstractEventLoop, before: int) -> None:
        """Unless this turn has brought more than the `before` of the last: then the next may, too."""
        with self._closing:
            works = self._turns.get(loop, [])  # none: the database was closed meanwhile, and took them
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

    def _next_works(self) -> tuple[list[_Work], bool]:
        """Wait for works, then take all that have gathered, up to about a group. True with the last before the end."""
        works: list[_Work] = []
        while (more := self._works.get()) is not None:
            works += more
            left = self._begun + self._apart_s - time.monotonic()
            if len(works) < ENOUGH and left > 0 and self._works.empty():
                time.sleep(left)
            if len(works) >= GROUP_SIZE or self._works.empty():
                return works, False
        return works, True

    def _commit(self, group: list[_Work]) -> BaseException | None:
        """Run and commit a group. An error returned is that of the transaction, and so of every work in it."""
        parts = _parts(group)
        if len(group) > 1 and all(works[0].batch is not None for works in parts):
            try:  # batches hardly ever fail: a savepoint for each would cost as much as they do
                return self._commit_parts(group, parts, savepoints=False)
            except _BatchFailed:  # nothing of it is so, nor what it has answered
                for work in group:
                    work.result, work.error, work.noted = None, None, []
        return self._commit_parts(group, parts, savepoints=len(group) > 1)

    def _commit_parts(self, group: list[_Work], parts: list[list[_Work]], *, savepoints: bool) -> BaseException | None:
        """Without `savepoints`, raises _BatchFailed and has done nothing if one of several fails."""
        locks = sorted({work.lock for work in group if work.lock})
        batches = all(works[0].batch is not None for works in parts)
        try:
            with self._write_engine.connect() as connection, connection.begin() as transaction:
                if locks:
                    lock_first(connection, locks, batches=batches)
                for works in parts:
                    if works[0].batch is not None:
                        _run_batch(works[0].batch, works, connection, savepoint=savepoints, only=len(group) == 1)
                    else:
                        _run(works[0], connection, alone=not savepoints)
                    if works[0].error is not None and _lost(connection):
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
                with suppress(OSError):  # the file stands behind, which is harmless
                    self._mark.write(count)
        except _BatchFailed:
            raise
        except BaseException as error:  # nobody may be left waiting for an answer
            if isinstance(error, WRONG) and len(group) > 1 and not savepoints:
                raise _BatchFailed from error  # what batches have written goes out with COMMIT
            return _cause(error)
        return None


class _BatchFailed(Exception):
    """A batch has failed in a transaction that it shares without a savepoint of its own."""


def _answer(group: list[_Work], error: BaseException | None) -> None:
    """Tell who waits; all coroutines of a loop in one call, which wakes it once."""
    loops: defaultdict[asyncio.AbstractEventLoop, list[_Work]] = defaultdict(list)
    for work in group:
        if work.waiting.loop is not None:
            loops[work.waiting.loop].append(work)
        else:
            work.answer(error)
    for loop, works in loops.items():
        with suppress(RuntimeError):  # the loop has closed meanwhile: nobody is left to tell
            loop.call_soon_threadsafe(_answer_all, works, error)


def _answer_all(works: list[_Work], error: BaseException | None) -> None:
    for work in works:
        work.answer(error)


def _batched(batch: Batch, item: Any, lock: str, waiting: _Waiting) -> _Work:
    return _Work(lambda _session: None, waiting, batch, item, lock, Context())


def _parts(group: list[_Work]) -> list[list[_Work]]:
    """What runs together, each at the place of its first work."""
    parts: list[list[_Work]] = []
    batches: dict[Batch, list[_Work]] = {}
    for work in group:
        if work.batch is not None and work.batch in batches:
            batches[work.batch].append(work)
            continue
        parts.append([work])
        if work.batch is not None:
            batches[work.batch] = parts[-1]
    return parts


def _run_batch(batch: Batch, works: list[_Work], connection: Connection, *, savepoint: bool, only: bool) -> None:
    """Run a batch; when it fails in its own savepoint, each of its items in one of its own. Raises _BatchFailed when it
    fails without one, unless this is the `only` work of the transaction."""
    mode: Literal["rollback_only", "create_savepoint"] = "create_savepoint" if savepoint else "rollback_only"
    with Session(connection, expire_on_commit=False, join_transaction_mode=mode) as session:
        try:
            results = works[0].context.run(batch, session, [work.item for work in works])
            if savepoint:
                send_now(connection)
            session.commit()
        except BaseException as error:
            session.rollback()  # without a savepoint, of all
            if not (savepoint or only):
                raise _BatchFailed from error
            if _lost(connection):
                raise
            if len(works) == 1:
                works[0].error = error
                return
            results = None
        noted = audit.pending(session)
    if results is None:
        for work in works:
            _run_batch(batch, [work], connection, savepoint=True, only=False)
        return
    for work, result in zip(works, results, strict=True):
        if isinstance(result, BaseException):
            work.error = result
        else:
            work.result, work.noted, noted = result, noted, []


def _cause(error: BaseException) -> BaseException:
    """What went wrong first: where SQLite has rolled all back (a full disk), there is no savepoint to go back to."""
    while "no such savepoint" in str(error) and error.__context__ is not None:
        error = error.__context__
    return error


def _lost(connection: Connection) -> bool:
    """Whether the transaction is over by itself: its connection broke, or SQLite has rolled it back (a full disk). What
    ran on would be written outside of it."""
    if connection.invalidated:
        return True
    driver = connection.connection.driver_connection
    return isinstance(driver, sqlite3.Connection) and not driver.in_transaction


def _run(work: _Work, connection: Connection, *, alone: bool) -> None:
    """Run one work in its own session, and unless it is alone in the transaction, in its own savepoint."""
    mode: Literal["rollback_only", "create_savepoint"] = "rollback_only" if alone else "create_savepoint"
    restricted = False
    try:
        with Session(connection, expire_on_commit=False, join_transaction_mode=mode) as session:
            restricted = work.context.run(enter, session)
            work.result = work.context.run(work.run, session)
            send_now(connection)
            session.commit()
            work.noted = audit.pending(session)
    except BaseException as error:
        work.error = _cause(error)
    if restricted and connection.in_transaction():
        lift(connection)
