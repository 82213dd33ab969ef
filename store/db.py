"""The database: many short reads from any thread, and one writer thread that groups commits.

A transaction costs far more than the few rows in it, so the writer runs everything that is waiting in one
transaction and commits once. There is no timer: an idle writer commits at once, and while it commits the next group
gathers by itself. Each work of a group runs in its own savepoint, so one that raises fails alone, and every caller is
answered after the COMMIT that holds its rows.

On SQLite a commit survives kill -9; it survives a power cut only with `durable` (synchronous=FULL).
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session

from store import audit

T = TypeVar("T")

#: Works in one transaction at most: it bounds how long the first of a group waits for the last.
GROUP_SIZE = 256
#: Another process may hold the lock of SQLite for a moment (`weftd key create` beside a server).
BUSY_TIMEOUT_MS = 30_000


class _Waiting(Protocol):
    """Who waits for a work, told in the writer thread after the commit (or the failure)."""

    def resolve(self, result: Any, error: BaseException | None) -> None: ...


@dataclass
class _Blocked:
    """A thread that waits."""

    future: Future[Any]

    def resolve(self, result: Any, error: BaseException | None) -> None:
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


@dataclass
class _Awaiting:
    """A coroutine that waits in its event loop. It may have been cancelled since: the write happens all the same."""

    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop

    def resolve(self, result: Any, error: BaseException | None) -> None:
        with suppress(RuntimeError):  # the loop has closed meanwhile: nobody is left to tell
            self.loop.call_soon_threadsafe(self._settle, result, error)

    def _settle(self, result: Any, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


@dataclass
class _Work:
    run: Callable[[Session], Any]
    waiting: _Waiting
    context: Context = field(default_factory=copy_context)  # the work runs as whoever has asked for it
    noted: list[dict[str, Any]] = field(default_factory=list)  # for the audit log
    result: Any = None
    error: BaseException | None = field(default=None)

    def answer(self, error: BaseException | None = None) -> None:
        self.waiting.resolve(self.result, self.error or error)


class Database:
    """One database, by URL: `sqlite:////abs/weft.db` or `postgresql+psycopg://...`."""

    def __init__(self, url: str, *, durable: bool = False) -> None:
        self.url = url
        sqlite = make_url(url).get_backend_name() == "sqlite"
        self._read_engine = create_engine(url, pool_size=8, max_overflow=56)
        self._write_engine = create_engine(url, pool_size=1, max_overflow=0)
        if sqlite:
            _prepare_sqlite(self._read_engine, begin="BEGIN", durable=durable, query_only=True)
            _prepare_sqlite(self._write_engine, begin="BEGIN IMMEDIATE", durable=durable, query_only=False)
        self._works: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False
        self._writer = threading.Thread(target=self._write_groups, name="database-writer", daemon=True)
        self._writer.start()

    def migrate(self) -> None:
        """Bring the tables up to date; nothing happens when they are. Safe when two processes start at once."""
        from store.migrate import upgrade

        upgrade(self.url)

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session for a short read, in any thread. It sees every write that was answered before it began."""
        with Session(self._read_engine, expire_on_commit=False, autoflush=False) as session:
            yield session

    async def write(self, work: Callable[[Session], T]) -> T:
        """Run `work` in the writer thread and return what it returned, once that is committed. Its exception is
        raised here, with nothing of it written. Objects that it returns are detached but loaded. `work` must be short
        and do no I/O of its own: every other writer waits for it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._submit(_Work(work, _Awaiting(future, loop)))
        return await future

    def write_now(self, work: Callable[[Session], T]) -> T:
        """`write` for a thread that may block: command line, start-up, tests."""
        if threading.current_thread() is self._writer:
            raise RuntimeError("write_now inside of a write would wait for itself: use the session you were given")
        future: Future[T] = Future()
        self._submit(_Work(work, _Blocked(future)))
        return future.result()

    def close(self) -> None:
        """Commit what is waiting, then refuse more."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._works.put(None)
        self._writer.join()
        self._read_engine.dispose()
        self._write_engine.dispose()

    def _submit(self, work: _Work) -> None:
        with self._closing:
            if self._closed:
                raise RuntimeError("the database is closed")
            self._works.put(work)

    def _write_groups(self) -> None:
        while True:
            group, last = self._next_group()
            if group:
                error = self._commit(group)
                for work in group:
                    work.answer(error)
            del group
            if last:
                return

    def _next_group(self) -> tuple[list[_Work], bool]:
        """Wait for one work, then take all that have gathered. True with the last group before the end."""
        group: list[_Work] = []
        work = self._works.get()
        while work is not None:
            group.append(work)
            if len(group) == GROUP_SIZE or self._works.empty():
                return group, False
            work = self._works.get()
        return group, True

    def _commit(self, group: list[_Work]) -> BaseException | None:
        """Run and commit a group. An error returned is that of the transaction, and so of every work in it."""
        try:
            with self._write_engine.connect() as connection, connection.begin() as transaction:
                for work in group:
                    _run(work, connection, alone=len(group) == 1)
                audit.seal(connection, [entry for work in group if work.error is None for entry in work.noted])
                if transaction.is_active and all(work.error is not None for work in group):
                    transaction.rollback()
        except BaseException as error:  # nobody may be left waiting for an answer
            return error
        return None


def _run(work: _Work, connection: Connection, *, alone: bool) -> None:
    """Run one work in its own session, and unless it is alone in the transaction, in its own savepoint."""
    mode: Literal["rollback_only", "create_savepoint"] = "rollback_only" if alone else "create_savepoint"
    try:
        with Session(connection, expire_on_commit=False, join_transaction_mode=mode) as session:
            work.result = work.context.run(work.run, session)
            session.commit()
            work.noted = audit.pending(session)
    except BaseException as error:
        work.error = error


def use_wal(connection: sqlite3.Connection) -> None:
    """Have readers and a writer not wait for each other. The database remembers it; while it is changed the first time,
    whoever else opens the database is told "locked" at once, whatever the busy timeout, and so must ask again."""
    deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _prepare_sqlite(engine: Engine, *, begin: str, durable: bool, query_only: bool) -> None:
    """Have SQLAlchemy, not the driver, begin transactions; and set what SQLite keeps for each connection."""

    @event.listens_for(engine, "connect")
    def connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
        use_wal(connection)
        connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute(f"PRAGMA query_only={'ON' if query_only else 'OFF'}")

    @event.listens_for(engine, "begin")
    def start(connection: Connection) -> None:
        connection.exec_driver_sql(begin)
