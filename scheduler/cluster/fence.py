"""Who leads, decided in the database; and writes that only the leader's count.

The lease is the row "journal" of `job_leases`: a token and a time. A new leader puts its own token there, which waits
for whatever the old one is committing. Every write of a leader reads the token in its own transaction: one that was
superseded without noticing, because it was stopped or cut off, can change nothing any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, TypeVar

from sqlalchemy import or_, select, update
from sqlalchemy.orm import Session

from store import tables
from store.database.bulk import Question, insert_into, make_sure, require
from store.database.db import Database
from store.database.works import Batch

T = TypeVar("T")

_SELECT = select(tables.JobLease.holder).where(tables.JobLease.name == tables.LEADS).with_for_update(read=True)
_HOLDER: Question = {"postgresql": _SELECT, "sqlite": _SELECT}


class Superseded(BaseException):
    """Another process leads. Not an Exception: nothing that goes on after an error may go on after this."""


def take(session: Session, token: str, now: datetime) -> bool:
    """In a write: become the leader, or stay it. False while somebody else is."""
    lease, until = tables.JobLease, now + timedelta(seconds=tables.LEADS_S)
    if session.get(lease, tables.LEADS) is None:
        stand = insert_into(session, lease).values(name=tables.LEADS, holder=token, until=until)
        stand = stand.on_conflict_do_nothing(index_elements=["name"])  # several may stand at the first start of all
        return session.scalar(stand.returning(lease.holder)) == token
    free = or_(lease.holder == token, lease.over(now, tables.LEADS_S))
    change = update(lease).where(lease.name == tables.LEADS, free).values(holder=token, until=until)
    return session.scalar(change.returning(lease.holder)) == token


def give_up(session: Session, token: str, now: datetime) -> None:
    """In a write: the next one need not wait for the lease to end."""
    lease = tables.JobLease
    session.execute(update(lease).where(lease.name == tables.LEADS, lease.holder == token).values(until=now, holder=""))


def check(session: Session, token: str) -> None:
    """Raise Superseded unless `token` leads, now or with what is asked next, and keep it so until this transaction is
    over."""

    def leads(found: list[Any]) -> None:
        if [row[0] for row in found] != [token]:
            raise Superseded(token)

    require(session.connection(), _HOLDER, {}, leads)


class Fenced:
    """`Transactions` as a leader has them: every write checks first that it still leads."""

    def __init__(self, database: Database, token: str) -> None:
        self._database = database
        self._token = token
        self._batches: dict[Batch, Batch] = {}  # what runs together must be one batch

    @contextmanager
    def read(self) -> Iterator[Session]:
        with self._database.read() as session:
            yield session

    async def write(self, work: Callable[[Session], T]) -> T:
        return await self._database.write(self._checked(work))

    async def write_batched(self, batch: Batch, item: Any, *, lock: str) -> Any:
        return await self._database.write_batched(self._checked_batch(batch), item, lock=lock)

    def _checked_batch(self, batch: Batch) -> Batch:
        def run(session: Session, items: list[Any]) -> list[Any]:
            check(session, self._token)
            done = batch(session, items)
            make_sure(session.connection())  # while it harms nobody who shares the transaction
            return done

        return self._batches.setdefault(batch, run)

    def _checked(self, work: Callable[[Session], T]) -> Callable[[Session], T]:
        def run(session: Session) -> T:
            check(session, self._token)
            return work(session)

        return run
