"""Whether numbers of runs and samplers have been taken, for a replica, which cannot know: it looks into the database,
once for all that is asked in one turn of the event loop, and while it looks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass

from sqlalchemy import select, tuple_

from store import tables
from store.db import Database

#: Looked up at once.
MOST = 256

#: (lane, seq)
Key = tuple[str, int]


@dataclass(frozen=True)
class Number:
    """`taken`: an operation was accepted under it. `run_open`: its lane is a run that takes operations."""

    taken: bool
    run_open: bool


def numbers_of(database: Database, keys: Sequence[Key]) -> list[Number]:
    """In the order of `keys`."""
    row, run, owner = tables.Operation, tables.Run, tables.Session
    taken = select(row.lane, row.seq).where(tuple_(row.lane, row.seq).in_(keys))
    runs = select(run.id).join(owner, owner.id == run.session_id)
    runs = runs.where(run.id.in_({lane for lane, _ in keys}), run.state == "live", owner.state == "active")
    with database.read() as session:
        known, live = {tuple(found) for found in session.execute(taken)}, set(session.scalars(runs))
    return [Number(key in known, key[0] in live) for key in keys]


class Gathered:
    """`look` finds many at a time. Lives in one event loop."""

    def __init__(self, look: Callable[[list[Key]], Awaitable[list[Number]]]) -> None:
        self._look = look
        self._waiting: list[tuple[Key, asyncio.Future[Number]]] = []
        self._looking: asyncio.Task[None] | None = None

    async def get(self, key: Key) -> Number:
        """As it is in the database now. Raises what the look-up raises."""
        found: asyncio.Future[Number] = asyncio.get_running_loop().create_future()
        self._waiting.append((key, found))
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_all(), context=Context())  # for all, not for who asks first
        return await found

    async def _look_all(self) -> None:
        try:
            while self._waiting:
                some, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
                await self._answer(some)
        finally:
            self._looking = None

    async def _answer(self, some: list[tuple[Key, asyncio.Future[Number]]]) -> None:
        try:
            numbers = await self._look([key for key, _ in some])
        except Exception as error:
            for _, waiting in some:
                if not waiting.done():  # nobody waits for it any more
                    waiting.set_exception(error)
            return
        for (_, waiting), number in zip(some, numbers, strict=True):
            if not waiting.done():
                waiting.set_result(number)
