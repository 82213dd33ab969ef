"""One replica leads, and one that was superseded can change nothing."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from threading import Barrier

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from scheduler.cluster.fence import Fenced, Superseded, give_up, take
from store import tables
from store.database.bulk import insert_rows
from store.database.db import Database

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def lead(database: Database, token: str, after_s: float = 0.0) -> bool:
    return database.write_now(lambda session: take(session, token, NOW + timedelta(seconds=after_s)))


def test_a_replica_leads_until_its_lease_is_over(any_database: Database) -> None:
    assert lead(any_database, "a")
    assert not lead(any_database, "b", 4)
    assert lead(any_database, "a", 4)
    assert not lead(any_database, "b", 8)
    assert lead(any_database, "b", 9.1)
    assert not lead(any_database, "a", 9.2)


def test_of_all_that_start_at_once_one_leads(postgres_database: Database) -> None:
    """On a new database all of them found no lease, and all but one failed to insert theirs."""
    together = Barrier(4)

    def stand(token: str) -> bool:
        with Session(postgres_database._read_engine) as session, session.begin():
            session.execute(select(1))
            together.wait(10)
            return take(session, token, NOW)

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(stand, "abcd")) == [False, False, False, True]


def test_a_lease_from_a_clock_that_was_ahead_holds_up_nobody(any_database: Database) -> None:
    """Otherwise nobody would lead for years. A small step back of the clock takes the lease from nobody."""
    assert lead(any_database, "a", 4)
    assert not lead(any_database, "b", 0)
    assert lead(any_database, "a", 10 * 365 * 86_400)
    assert lead(any_database, "b", 8)
    assert not lead(any_database, "a", 9)


def test_one_that_stops_leaves_the_lease_to_the_next(any_database: Database) -> None:
    assert lead(any_database, "a")
    any_database.write_now(lambda session: give_up(session, "b", NOW))
    assert not lead(any_database, "b", 1)
    any_database.write_now(lambda session: give_up(session, "a", NOW + timedelta(seconds=1)))
    assert lead(any_database, "b", 1.001)


def note(name: str) -> tables.Alert:
    return tables.Alert(kind="test", ref=name, message="", detail={}, raised_at=NOW)


def names(database: Database) -> set[str]:
    with database.read() as session:
        return set(session.scalars(select(tables.Alert.ref)))


def test_every_kind_of_write_of_one_that_was_superseded_is_refused(any_database: Database) -> None:
    lead(any_database, "old")
    old = Fenced(any_database, "old")
    asyncio.run(old.write(lambda session: session.add(note("first"))))
    lead(any_database, "new", 6)

    def batch(session, items):  # type: ignore[no-untyped-def]
        session.add_all([note(item) for item in items])
        return items

    with pytest.raises(Superseded):
        asyncio.run(old.write_batched(batch, "late in a batch", lock="x"))
    with pytest.raises(Superseded):
        asyncio.run(old.write(lambda session: session.add(note("late"))))
    new = Fenced(any_database, "new")
    assert asyncio.run(new.write_batched(batch, "second", lock="x")) == "second"
    assert names(any_database) == {"first", "second"}


def test_a_batch_that_asks_nothing_is_refused_before_its_commit_and_its_neighbours_are_not(
    any_database: Database,
) -> None:
    lead(any_database, "a")

    def batch(session: Session, items: list[str]) -> list[str]:
        rows = [{"kind": "test", "ref": item, "message": "", "detail": {}, "raised_at": NOW} for item in items]
        insert_rows(session.connection(), tables.Alert, rows)
        return items

    async def scenario() -> list[object]:
        leaders = [Fenced(any_database, token) for token in ("a", "b", "a")]
        writes = [one.write_batched(batch, f"{place}", lock="x") for place, one in enumerate(leaders)]
        return await asyncio.gather(*writes, return_exceptions=True)

    first, late, last = asyncio.run(scenario())
    assert (first, type(late), last) == ("0", Superseded, "2")
    assert names(any_database) == {"0", "2"}


@pytest.mark.parametrize("at_once", [False, True], ids=["at the end", "with a statement"])
def test_a_refusal_harms_nobody_who_writes_at_the_same_moment(any_database: Database, at_once: bool) -> None:
    """A refusal among SQLAlchemy's own work on a statement took the connection, and all who wrote, with it."""
    lead(any_database, "a")
    good, bad = Fenced(any_database, "a"), Fenced(any_database, "b")

    def noted(session: Session, name: str) -> None:
        session.add(note(name))
        if at_once:
            session.execute(select(1))

    async def scenario() -> list[object]:
        writes = [
            fenced.write(lambda session, name=f"{place}{number}": noted(session, name))
            for number in range(10)
            for place, fenced in (("good", good), ("bad", bad))
        ]
        return await asyncio.gather(*writes, return_exceptions=True)

    told = asyncio.run(scenario())
    assert [isinstance(answer, Superseded) for answer in told] == [False, True] * 10
    assert names(any_database) == {f"good{number}" for number in range(10)}
