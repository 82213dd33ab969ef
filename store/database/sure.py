"""A write that is not repeated because its answer was lost: for commands, which the operator would otherwise type
again.

A connection may break, or a server be restarted, between a COMMIT and its answer. PostgreSQL knows of each transaction
whether it was committed, so it is asked, by the transaction's number. SQLite has no connection to lose. And who presses
Ctrl-C while the write waits for others gives it up: it is not committed later, behind their back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import TypeVar

from sqlalchemy import func, select
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import Session

from store.database.db import Database
from store.logs import in_a_line

T = TypeVar("T")

#: How long to wait for a lost PostgreSQL to come back and answer.
PATIENCE_S = 30.0
ASK_AGAIN_S = 0.2


class Unsure(RuntimeError):
    """Nobody can tell whether the write was done."""


def write_surely(database: Database, work: Callable[[Session], T]) -> T:
    """`Database.write_now` that reports a failure only if the write failed. Raises Unsure if PostgreSQL does not
    tell."""
    done: list[tuple[int, T]] = []
    given_up = threading.Event()

    def numbered(session: Session) -> T:
        result = work(session)
        if session.connection().dialect.name == "postgresql":
            done[:] = [(session.execute(select(func.txid_current())).scalar_one(), result)]
        if given_up.is_set():
            raise KeyboardInterrupt
        return result

    try:
        return _unless_given_up(partial(database.write_now, numbered), given_up)
    except OperationalError as error:
        if not (done and error.connection_invalidated):
            raise
        ((number, result),) = done
        if not _was_committed(database, number, error):
            raise
        return result


def _unless_given_up(write: Callable[[], T], given_up: threading.Event) -> T:
    """The result of `write`, even after a Ctrl-C that came too late."""
    with ThreadPoolExecutor(1, thread_name_prefix="writing") as pool:
        writing = pool.submit(copy_context().run, write)
        try:
            return writing.result()
        except KeyboardInterrupt:
            given_up.set()
            return writing.result()


def _was_committed(database: Database, number: int, lost: OperationalError) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            with database.ask() as connection:
                status = connection.scalar(select(func.txid_status(number)))
        except DBAPIError:  # still away; or another server, which does not know the transaction
            status = None
        if status in ("committed", "aborted"):
            return bool(status == "committed")
        if time.monotonic() > deadline:
            raise Unsure(in_a_line(lost)) from lost
        time.sleep(ASK_AGAIN_S)  # "in progress": it has not noticed yet that its client is gone
