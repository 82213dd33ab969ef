"""Two servers on one PostgreSQL get signs of life of the same sessions, or end them, at the same moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from api.state import liveness
from api.state.liveness import Liveness
from store import tables
from store.database.db import Database
from tests.rows import session_row

LONG_AGO = datetime.now(UTC) - timedelta(days=1)
IDLE = LONG_AGO + timedelta(hours=1)


@pytest.fixture
def one(postgres_database: Database) -> Database:
    """An organisation with two sessions that have been silent for a day."""
    organisation = tables.Organisation(id="a", name="a", created_at=LONG_AGO)
    postgres_database.write_now(lambda session: session.add(organisation))
    postgres_database.write_now(lambda session: session.add_all([session_row("a", LONG_AGO, id) for id in "st"]))
    return postgres_database


@pytest.fixture
def two(one: Database) -> Iterator[Database]:
    with closing(Database(one.url)) as database:
        yield database


def hear(database: Database, ids: str) -> None:
    """Write signs of life of these sessions, in this order."""
    heard = Liveness(database)
    for id in ids:
        heard.asked(SimpleNamespace(domain="a"), id)  # type: ignore[arg-type]
    asyncio.run(heard.flush())


def test_who_finishes_a_session_that_another_server_ends_for_its_silence_is_believed(
    one: Database, two: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, begun = liveness.end, list[Future[None]]()

    def finish() -> None:
        def write(session: Any) -> None:
            row = session.get_one(tables.Session, "s")
            end(session, row, "finished", reason="success", detail=None, key_id=None)

        two.write_now(write)

    def late(*arguments: Any, **facts: Any) -> bool:
        if not begun:
            begun.append(pool.submit(finish))
            wait(begun, 0.5)  # unless it has to wait for this
        return end(*arguments, **facts)

    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(liveness, "end", late)
        one.write_now(lambda session: liveness.end_idle(session, IDLE, {"t"}))
    begun[0].result()
    with one.read() as session:
        ends = [(row.event, row.detail) for row in session.query(tables.AuditEntry).filter_by(target="s")]
        row = session.get_one(tables.Session, "s")
        assert len(ends) == 1
        assert (f"session_{row.state}", {"reason": row.finish_reason} if row.finish_reason else {}) == ends[0]


def test_servers_that_hear_of_the_same_sessions_do_not_wait_for_each_other_in_a_ring(
    one: Database, two: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch = liveness._touch

    def slowly(*arguments: Any) -> bool:
        there = touch(*arguments)
        time.sleep(0.3)
        return there

    monkeypatch.setattr(liveness, "_touch", slowly)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(hear, (one, two), ("st", "ts")))
    assert one.write_now(lambda session: liveness.end_idle(session, IDLE, set())) == []
