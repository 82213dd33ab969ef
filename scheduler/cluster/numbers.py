"""Whether numbers of runs and samplers have been taken, for a replica, which cannot know: it looks into the database,
once for all that is asked in one turn of the event loop, while it looks, and for a moment after it began."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, select, text, tuple_

from scheduler.cluster.outbox import Pace
from store import tables
from store.database.bulk import among
from store.database.db import Database

#: Looked up at once.
MOST = 256

#: (lane, seq)
Key = tuple[str, int]

_OP = tables.Operation.__table__
_TAKEN = text(
    "SELECT lane, seq FROM operations JOIN unnest(CAST(:lanes AS text[]), CAST(:seqs AS bigint[])) "
    "AS asked (lane, seq) USING (lane, seq)"
)


def _live(chosen: ColumnElement[bool]) -> Select[Any]:
    run, owner = tables.Run, tables.Session
    runs = select(run.id).join(owner, owner.id == run.session_id)
    return runs.where(chosen, run.state == "live", owner.state == "active")


_LIVE = {dialect: _live(chosen) for dialect, chosen in among(tables.Run.__table__.c.id, "runs").items()}


@dataclass(frozen=True)
class Number:
    """`taken`: an operation was accepted under it. `run_open`: its lane is a run that takes operations."""

    taken: bool
    run_open: bool


def numbers_of(database: Database, keys: Sequence[Key]) -> list[Number]:
    """In the order of `keys`."""
    lanes, seqs = [lane for lane, _ in keys], [seq for _, seq in keys]
    with database.ask() as connection:
        if connection.dialect.name == "postgresql":
            taken = connection.execute(_TAKEN, {"lanes": lanes, "seqs": seqs})
        else:
            taken = connection.execute(select(_OP.c.lane, _OP.c.seq).where(tuple_(_OP.c.lane, _OP.c.seq).in_(keys)))
        known = {tuple(found) for found in taken}
        live = set(connection.scalars(_LIVE[connection.dialect.name], {"runs": sorted(set(lanes))}))
    return [Number(key in known, key[0] in live) for key in keys]


class Gathered:
    """`look` finds many at a time. Lives in one event loop."""

    def __init__(self, look: Callable[[list[Key]], Awaitable[list[Number]]]) -> None:
        self._look = look
        self._waiting: list[tuple[Key, asyncio.Future[Number]]] = []
        self._looking: asyncio.Task[None] | None = None
        self._pace = Pace()

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
                await self._pace.keep()
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
