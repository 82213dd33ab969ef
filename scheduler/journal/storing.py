"""Storing what must be stored, however often it takes.

A disk that is full, or a database that is away, delays; it never makes something fail that was computed already.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from sqlalchemy import Update
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, ProgrammingError, TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from scheduler.order.operations import Operation
from store.blobs.contract import Blobs
from store.blobs.room import Room
from store.database.db import Transactions

log = logging.getLogger(__name__)
T = TypeVar("T")

#: The first and the longest pause before another attempt.
AGAIN_S = (0.1, 5.0)
#: Errors of the database about the statement, not the moment: trying again would not help.
WRONG = (IntegrityError, DataError, ProgrammingError)


class Unrecorded(Exception):
    """The error of a write that can never succeed, however often it is tried."""


async def until_stored(attempt: Callable[[], Awaitable[T]], refused: Callable[[Exception, float], None]) -> T:
    """The result of `attempt`, which is repeated while disk or database do not answer. `refused` is called with each
    error and the pause after it. An attempt that failed may have taken effect all the same. Raises Unrecorded."""
    pause_s = AGAIN_S[0]
    while True:
        try:
            return await attempt()
        except WRONG as error:
            raise Unrecorded(str(error)) from error
        except (OSError, DBAPIError, PoolTimeout) as error:
            refused(error, pause_s)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, AGAIN_S[1])


def logged(error: BaseException) -> None:
    log.error("work in the background has failed", exc_info=error)


class Storing:
    """A journal's writes and deletions, beside the work of its event loop. `failed` is told what work in the background
    raises."""

    def __init__(
        self, database: Transactions, blobs: Blobs, room: Room, failed: Callable[[BaseException], None] = logged
    ) -> None:
        self._database, self._blobs, self._room, self._failed = database, blobs, room, failed
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopped = False

    def in_background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `work` as a task; after `stop` it is cancelled at once."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self.ended)
        if self._stopped:
            task.cancel()
        return task

    def ended(self, task: asyncio.Task[Any]) -> None:
        """A task that nobody awaits has ended."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)

    async def write(self, statement: Update) -> None:
        """Write, trying for as long as it takes."""
        await self.change(lambda session: session.execute(statement))

    async def change(self, work: Callable[[Session], T]) -> T:
        """The result of `work`, once committed, trying for as long as it takes; an earlier attempt may have taken
        effect. Raises Unrecorded."""

        def refused(error: Exception, pause_s: float) -> None:
            log.warning("%s; again in %.1f s", self._room.refused(error), pause_s)

        return await until_stored(lambda: self._database.write(work), refused)

    def drop_body(self, op: Operation) -> None:
        if op.body_ref:
            self._delete(op.body_ref, self._blobs.delete)

    def delete_tree(self, ref: str) -> None:
        self._delete(ref, self._blobs.delete_tree)

    def _delete(self, ref: str, delete: Callable[[str], None]) -> None:
        """Delete; what cannot be deleted for now is left to the reaper."""

        def attempt() -> None:
            try:
                delete(ref)
            except OSError as error:
                log.warning("%s cannot be deleted: %s", ref, error)

        if self._blobs.threads is None:
            attempt()
        else:
            self._blobs.threads.submit(attempt)

    async def flush(self) -> None:
        """Wait until everything that was begun in the background is stored."""
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    async def stop(self, within_s: float) -> None:
        """`flush`, including tasks begun meanwhile, but not for ever: what still cannot be stored is given up."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        while self._tasks and (left := deadline - loop.time()) > 0:
            await asyncio.wait(list(self._tasks), timeout=left)
        self._stopped = True
        for task in list(self._tasks):
            task.cancel()
