"""Works of the database's writer (`store.database.db`), and how the works of one transaction run: batches, each of
which does many items at once, and single works."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any, Literal

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from store.database import audit
from store.database.bulk import send_now
from store.database.caller import enter, lift


@dataclass
class Waiter:
    """The caller that waits for a work and is answered after the commit (or failure): a coroutine in its event loop, or
    a thread. A coroutine may have been cancelled since; the write happens all the same."""

    future: Future[Any] | asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop | None = None

    def resolve(self, result: Any, error: BaseException | None) -> None:
        if self.loop is not None and self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


#: Does many items as one work. Returns for each its result, or the exception with which it alone fails.
Batch = Callable[[Session, list[Any]], list[Any]]


@dataclass
class Work:
    """A function to run in the writer; or, with `batch`, an item for that batch."""

    run: Callable[[Session], Any]
    waiter: Waiter
    batch: Batch | None = None
    item: Any = None
    lock: str = ""
    context: Context = field(default_factory=copy_context)  # the work runs with its caller's context
    noted: list[dict[str, Any]] = field(default_factory=list)  # entries for the audit log
    result: Any = None
    error: BaseException | None = field(default=None)

    def answer(self, error: BaseException | None = None) -> None:
        self.waiter.resolve(self.result, self.error or error)


def batched(batch: Batch, item: Any, lock: str, waiter: Waiter) -> Work:
    return Work(lambda _session: None, waiter, batch, item, lock, Context())


class BatchFailed(Exception):
    """A batch failed in a shared transaction without having a savepoint of its own."""


def parts_of(group: list[Work]) -> list[list[Work]]:
    """The group cut into parts of works that run together, in the order of each part's first work."""
    parts: list[list[Work]] = []
    batches: dict[Batch, list[Work]] = {}
    for work in group:
        if work.batch is not None and work.batch in batches:
            batches[work.batch].append(work)
            continue
        parts.append([work])
        if work.batch is not None:
            batches[work.batch] = parts[-1]
    return parts


def run_batch(batch: Batch, works: list[Work], connection: Connection, *, savepoint: bool, only: bool) -> None:
    """Run a batch. If it fails within its own savepoint, each of its items is run in a savepoint of its own. If it
    fails without one, BatchFailed is raised, unless this is the `only` work of the transaction."""
    with _session_of_batch(connection, savepoint=savepoint) as session:
        try:
            results = works[0].context.run(batch, session, [work.item for work in works])
            if savepoint:
                send_now(connection)
            if session.in_transaction():
                session.commit()
        except BaseException as error:
            session.rollback()  # without a savepoint this undoes the whole transaction
            if not (savepoint or only):
                raise BatchFailed from error
            if is_lost(connection):
                raise
            if len(works) == 1:
                works[0].error = error
                return
            results = None
        noted = audit.pending(session)
    if results is None:
        for work in works:
            run_batch(batch, [work], connection, savepoint=True, only=False)
        return
    for work, result in zip(works, results, strict=True):
        if isinstance(result, BaseException):
            work.error = result
        else:
            work.result, work.noted, noted = result, noted, []


class _Within(Session):
    """A session in a transaction that goes on after it. If only its connection is used, as in most batches, the session
    begins no transaction of its own, and none has to be ended."""

    def connection(self, *_: Any, **__: Any) -> Connection:
        assert isinstance(self.bind, Connection)
        return self.bind


def _session_of_batch(connection: Connection, *, savepoint: bool) -> Session:
    if savepoint:
        return Session(connection, expire_on_commit=False, join_transaction_mode="create_savepoint")
    return _Within(connection, expire_on_commit=False, join_transaction_mode="rollback_only")


def cause_of(error: BaseException) -> BaseException:
    """The first error: if SQLite has rolled back everything (a full disk), going back to the savepoint fails as
    well."""
    while "no such savepoint" in str(error) and error.__context__ is not None:
        error = error.__context__
    return error


def is_lost(connection: Connection) -> bool:
    """True if the transaction has already ended: the connection broke, or SQLite has rolled back (a full disk). Further
    writes would be outside of the transaction."""
    if connection.invalidated:
        return True
    driver = connection.connection.driver_connection
    return isinstance(driver, sqlite3.Connection) and not driver.in_transaction


def run_alone(work: Work, connection: Connection, *, alone: bool) -> None:
    """Run one work in its own session; unless it is alone in the transaction, in its own savepoint."""
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
        work.error = cause_of(error)
    if restricted and connection.in_transaction():
        lift(connection)
