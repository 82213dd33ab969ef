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
    """Another process leads. A BaseException, so that no `except Exception` goes on after it."""


def take(session: Session, token: str, now: datetime) -> bool:
    """Within a write: become the leader, or stay it. False while another process leads."""
    lease, until = tables.JobLease, now + timedelta(seconds=tables.LEADS_S)
    if session.get(lease, tables.LEADS) is None:
        stand = insert_into(session, lease).values(name=tables.LEADS, holder=token, until=until)
        # at the very first start several replicas may insert the row
        stand = stand.on_conflict_do_nothing(index_elements=["name"])
        return session.scalar(stand.returning(lease.holder)) == token
    free = or_(lease.holder == token, lease.over(now, tables.LEADS_S))
    change = update(lease).where(lease.name == tables.LEADS, free).values(holder=token, until=until)
    return session.scalar(change.returning(lease.holder)) == token


def give_up(session: Session, token: str, now: datetime) -> None:
    """Within a write: give up the lease, so that the next leader need not wait for its end."""
    lease = tables.JobLease
    session.execute(update(lease).where(lease.name == tables.LEADS, lease.holder == token).values(until=now, holder=""))


def check(session: Session, token: str) -> None:
    """Raise Superseded unless `token` leads, now or with the next query; it then stays so until this transaction
    ends."""

    def leads(found: list[Any]) -> None:
        if [row[0] for row in found] != [token]:
            raise Superseded(token)

    require(session.connection(), _HOLDER, {}, leads)


class Fenced:
    """`Transactions` for a leader: every write first checks that it still leads."""

    def __init__(self, database: Database, token: str) -> None:
        self._database = database
        self._token = token
        # calls of one batch function must pass the same function to be run together
        self._batches: dict[Batch, Batch] = {}

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
            make_sure(session.connection())  # now: a failing check must not fail batches that share the transaction
            return done

        return self._batches.setdefault(batch, run)

    def _checked(self, work: Callable[[Session], T]) -> Callable[[Session], T]:
        def run(session: Session) -> T:
            check(session, self._token)
            return work(session)

        return run
