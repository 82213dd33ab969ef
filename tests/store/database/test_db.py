"""Group commit: one transaction for all writes that wait, and each write succeeds or fails alone."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest
from sqlalchemy import event, func, insert, select, text
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import Session

from store.database import db
from store.database.caller import Caller, acting_as
from store.database.db import APART_S, ENOUGH, GROUP_SIZE, Database
from store.tables import ApiKey, Organisation

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def add(name: str) -> Callable[[Session], str]:
    def work(session: Session) -> str:
        session.add(Organisation(id=name, name=name, created_at=NOW))
        return name

    return work


def names(database: Database) -> set[str]:
    with database.read() as session:
        return set(session.scalars(select(Organisation.name)))


def count_commits(database: Database) -> list[None]:
    """A list that grows with every COMMIT of the writer."""
    commits: list[None] = []
    event.listen(database._write_engine, "commit", lambda _connection: commits.append(None))
    return commits


@contextmanager
def busy_writer(database: Database) -> Iterator[None]:
    """Keep the writer busy inside the block, so that all writes made there gather into one group."""
    started, release = threading.Event(), threading.Event()

    def work(_session: Session) -> None:
        started.set()
        release.wait(10)

    thread = threading.Thread(target=database.write_now, args=(work,))
    thread.start()
    started.wait(10)
    try:
        yield
    finally:
        release.set()
        thread.join()


async def gather(database: Database, works: list[Callable[[Session], str]]) -> list[str | BaseException]:
    """Do all works in as few groups as possible; returns their answers or errors."""
    with busy_writer(database):
        tasks = [asyncio.create_task(database.write(work)) for work in works]
        await asyncio.sleep(0)
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_an_answered_write_is_visible(database: Database) -> None:
    async def main() -> None:
        assert await database.write(add("a")) == "a"
        assert names(database) == {"a"}

    asyncio.run(main())


def test_writes_that_wait_share_one_commit(database: Database) -> None:
    commits = count_commits(database)
    results = asyncio.run(gather(database, [add(f"n{i}") for i in range(100)]))
    assert results == [f"n{i}" for i in range(100)]
    assert len(names(database)) == 100
    assert len(commits) == 2  # of the busy write, and of the group


def test_writes_of_consecutive_turns_of_the_loop_share_one_commit(database: Database) -> None:
    commits = count_commits(database)

    async def later(turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        time.sleep(0.02)  # noqa: ASYNC251  what else the loop does; the writer could commit meanwhile
        await database.write(add(f"n{turns}"))

    async def main() -> None:
        await asyncio.gather(*(later(turns) for turns in range(5)))

    asyncio.run(main())
    assert len(names(database)) == 5
    assert len(commits) == 1


def test_commits_to_postgresql_keep_a_distance_and_writes_that_come_meanwhile_share_one(
    postgres_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, waits = threading.Event(), list[float]()

    class Still:
        """A clock that stands still."""

        @staticmethod
        def monotonic() -> float:
            return 1000.0

        @staticmethod
        def sleep(seconds: float) -> None:
            waits.append(seconds)
            go_on.wait(10)

    monkeypatch.setattr(db, "time", Still)
    commits = count_commits(postgres_database)

    async def main() -> None:
        await postgres_database.write(add("alone"))
        assert not waits
        others = []
        for number in range(3):
            others.append(asyncio.create_task(postgres_database.write(add(f"n{number}"))))
            await asyncio.sleep(0.05)  # long enough for the writer to begin, if it did not wait
        go_on.set()
        await asyncio.gather(*others)

    asyncio.run(main())
    assert waits[0] == pytest.approx(APART_S)
    assert len(commits) == 2


def test_a_caller_of_an_organisation_cannot_ask_without_a_session(database: Database) -> None:
    with database.ask() as connection:
        assert connection.scalar(text("SELECT 1")) == 1
    with acting_as(Caller("org", "key:1")), pytest.raises(RuntimeError, match="session"), database.ask():
        pass


def test_turns_that_always_bring_more_writes_delay_nobody(database: Database) -> None:
    sizes: list[int] = []

    def batch(_session: Session, items: list[int]) -> list[int]:
        sizes.append(len(items))
        return items

    async def main() -> None:
        writes = []
        for item in range(ENOUGH + 10):
            writes.append(asyncio.create_task(database.write_batched(batch, item, lock="")))
            await asyncio.sleep(0)
            time.sleep(0.002)  # noqa: ASYNC251  the writer takes what it is given
        assert await asyncio.gather(*writes) == list(range(ENOUGH + 10))

    asyncio.run(main())
    assert sizes[0] == ENOUGH


def test_a_group_is_bounded(database: Database) -> None:
    commits = count_commits(database)
    asyncio.run(gather(database, [add(f"n{i}") for i in range(GROUP_SIZE + 1)]))
    assert len(commits) == 3


def test_a_write_that_raises_fails_alone(database: Database) -> None:
    def half_done(session: Session) -> str:
        add("never")(session)
        session.flush()
        raise KeyError("mine")

    results = asyncio.run(gather(database, [add("a"), half_done, add("a"), add("b")]))
    assert results[0] == "a"
    assert isinstance(results[1], KeyError)
    assert isinstance(results[2], IntegrityError)
    assert results[3] == "b"
    assert names(database) == {"a", "b"}


def test_the_writer_keeps_its_connection_until_something_fails_on_it(database: Database) -> None:
    """A failure may leave the connection in an unknown state; given back to its pool, it is reset or replaced."""
    given_back: list[None] = []
    event.listen(database._write_engine, "checkin", lambda *_: given_back.append(None))
    database.write_now(add("a"))
    database.write_now(add("b"))
    assert given_back == []
    with pytest.raises(IntegrityError):
        database.write_now(add("a"))
    assert len(given_back) == 1
    database.write_now(add("c"))
    assert len(given_back) == 1
    assert names(database) == {"a", "b", "c"}


def test_a_batch_may_ask_for_its_connection_or_work_in_its_session(database: Database) -> None:
    def direct(session: Session, given: list[str]) -> list[str]:
        for name in given:
            values = {"id": name, "name": name, "created_at": NOW}
            session.connection().execute(insert(Organisation).values(values))
        return given

    def mapped(session: Session, given: list[str]) -> list[str]:
        return [add(name)(session) for name in given]

    async def main() -> None:
        for name, batch in (("a", direct), ("b", mapped)):  # each alone, in a transaction without savepoints
            assert await database.write_batched(batch, name, lock="") == name
            with pytest.raises(IntegrityError):
                await database.write_batched(batch, name, lock="")

    asyncio.run(main())
    assert names(database) == {"a", "b"}


def test_a_batch_that_raises_takes_no_other_with_it(database: Database) -> None:
    """Batches share a transaction without savepoints; when one fails, all are done again with them."""
    commits = count_commits(database)

    def insert(session: Session, names: list[str]) -> list[str]:
        return [add(name)(session) for name in names]

    def never(session: Session, names: list[str]) -> list[str]:
        insert(session, names)
        session.flush()
        raise KeyError("mine")

    async def main() -> list[str | BaseException]:
        works = [(insert, "a"), (insert, "a"), (never, "b"), (insert, "c")]
        batched = (database.write_batched(batch, name, lock="") for batch, name in works)
        return await asyncio.gather(*batched, return_exceptions=True)

    results = asyncio.run(main())
    assert [type(result) for result in results] == [str, IntegrityError, KeyError, str]
    assert names(database) == {"a", "c"}
    assert len(commits) == 1  # all writes of one turn of the loop are one group


def test_a_batch_that_is_done_again_answers_anew(database: Database) -> None:
    """What it refused at its first try may be allowed at the second."""
    tries: list[str] = []

    def insert(session: Session, names: list[str]) -> list[str | BaseException]:
        tries.append("insert")
        return [KeyError("full")] if len(tries) == 1 else [add(name)(session) for name in names]

    def once(_session: Session, names: list[str]) -> list[str]:
        tries.append("once")
        if tries.count("once") == 1:
            raise KeyError("mine")
        return names

    async def main() -> list[str]:
        return await asyncio.gather(
            database.write_batched(insert, "a", lock=""), database.write_batched(once, "b", lock="")
        )

    assert asyncio.run(main()) == ["a", "b"]
    assert names(database) == {"a"}


def test_a_lone_write_that_raises_writes_nothing_and_the_writer_goes_on(database: Database) -> None:
    def half_done(session: Session) -> None:
        add("never")(session)
        session.flush()
        raise KeyError("mine")

    with pytest.raises(KeyError):
        database.write_now(half_done)
    with pytest.raises(IntegrityError):
        database.write_now(lambda session: session.add(ApiKey(org_id="x", prefix="", secret_sha256="", created_at=NOW)))
    assert database.write_now(add("a")) == "a"
    assert names(database) == {"a"}


def test_writes_of_one_group_see_those_before_them(database: Database) -> None:
    def count(session: Session) -> str:
        return str(session.scalar(select(func.count()).select_from(Organisation)))

    assert asyncio.run(gather(database, [add("a"), count, add("b"), count])) == ["a", "1", "b", "2"]


def test_returned_rows_are_loaded(database: Database) -> None:
    def work(session: Session) -> Organisation:
        row = Organisation(id="a", name="a", created_at=NOW)
        session.add(row)
        return row

    assert database.write_now(work).created_at == NOW


def test_timestamps_come_back_in_utc(database: Database) -> None:
    database.write_now(add("a"))
    with database.read() as session:
        row = session.get_one(Organisation, "a")
    assert row.created_at == NOW
    assert row.created_at.tzinfo is UTC


def test_a_full_disk_writes_nothing_of_the_group(database: Database) -> None:
    """SQLite rolls the transaction back by itself; the group's later writes would be made outside of any."""
    limit = "PRAGMA max_page_count = {}"
    pages = database.write_now(lambda session: session.scalar(text("PRAGMA page_count")))
    database.write_now(lambda session: session.execute(text(limit.format(pages + 10))).all())
    results = asyncio.run(gather(database, [add("a"), add("x" * 1_000_000), add("b")]))
    assert [type(result) for result in results] == [OperationalError] * 3
    assert all("is full" in str(result) for result in results)
    assert names(database) == set()
    database.write_now(lambda session: session.execute(text(limit.format(pages + 10_000))).all())
    assert database.write_now(add("b")) == "b"
    assert names(database) == {"b"}


def test_a_disk_that_is_full_for_a_batch_is_told_to_the_whole_group(database: Database) -> None:
    """And not that the savepoint to go back to is missing: SQLite has rolled that back too."""
    limit = "PRAGMA max_page_count = {}"
    pages = database.write_now(lambda session: session.scalar(text("PRAGMA page_count")))
    database.write_now(lambda session: session.execute(text(limit.format(pages + 10))).all())

    def insert(session: Session, names: list[str]) -> list[str]:
        return [add(name)(session) for name in names]

    async def main() -> list[str | BaseException]:
        with busy_writer(database):
            waiting = [database.write_batched(insert, "x" * 1_000_000, lock=""), database.write(add("a"))]
            tasks = [asyncio.ensure_future(each) for each in waiting]
            await asyncio.sleep(0)
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert all("is full" in str(result) for result in asyncio.run(main()))
    assert names(database) == set()


def test_a_failed_commit_fails_every_work_of_the_group(database: Database) -> None:
    def fail(_connection: object) -> None:
        raise sqlite3.OperationalError("disk full")

    event.listen(database._write_engine, "commit", fail)
    with pytest.raises(sqlite3.OperationalError):
        database.write_now(add("a"))
    event.remove(database._write_engine, "commit", fail)
    assert names(database) == set()
    database.write_now(add("b"))
    assert names(database) == {"b"}


def test_a_cancelled_write_happens_all_the_same(database: Database) -> None:
    async def main() -> None:
        with busy_writer(database):
            task = asyncio.create_task(database.write(add("a")))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await database.write(add("b"))

    asyncio.run(main())
    assert names(database) == {"a", "b"}


def test_a_reader_cannot_write(database: Database) -> None:
    with database.read() as session:
        session.add(Organisation(id="a", name="a", created_at=NOW))
        with pytest.raises(OperationalError, match="readonly"):
            session.flush()


def test_readers_do_not_wait_for_the_writer(database: Database) -> None:
    with busy_writer(database):
        assert names(database) == set()


def test_write_now_inside_of_a_write_is_refused(database: Database) -> None:
    with pytest.raises(RuntimeError, match="wait for itself"):
        database.write_now(lambda _session: database.write_now(add("a")))


def option(session: Session, level: int, name: int) -> int:
    """An option of the socket over which a session talks to PostgreSQL."""
    driver = session.connection().connection.driver_connection
    assert driver is not None
    with socket.socket(fileno=os.dup(driver.pgconn.socket)) as connected:
        return connected.getsockopt(level, name)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other options")
def test_a_postgresql_that_fell_silent_is_given_up_soon_unless_the_url_says_otherwise(
    postgres_database: Database,
) -> None:
    """Neither reads nor writes wait as long as the kernel would: a quarter of an hour, or two hours."""
    patient = Database(f"{postgres_database.url}?tcp_user_timeout=60000")

    def waits_ms(session: Session) -> int:
        return option(session, socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)

    def asks_after_s(session: Session) -> int:
        assert option(session, socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        return option(session, socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)

    for database, limit in ((postgres_database, 15_000), (patient, 60_000)):
        assert database.write_now(waits_ms) == limit
        assert database.write_now(asks_after_s) == 5
        with database.read() as session:
            assert (waits_ms(session), asks_after_s(session)) == (limit, 5)
    patient.close()


def test_close_commits_the_writes_that_wait_and_refuses_more(database: Database) -> None:
    async def main() -> None:
        with busy_writer(database):
            tasks = [asyncio.create_task(database.write(add(f"n{i}"))) for i in range(10)]
            await asyncio.sleep(0)
            closing = threading.Thread(target=database.close)
            closing.start()
        await asyncio.gather(*tasks)
        closing.join()

    asyncio.run(main())
    with pytest.raises(RuntimeError, match="closed"):
        database.write_now(add("late"))
    assert sqlite3.connect(database.url.removeprefix("sqlite:///")).execute(
        "select count(*) from organisations"
    ).fetchone() == (10,)


def test_threads_and_coroutines_write_together(database: Database) -> None:
    async def main() -> None:
        def fifty(thread: int) -> None:
            for i in range(50):
                database.write_now(add(f"t{thread}.{i}"))

        threads = [asyncio.to_thread(fifty, thread) for thread in range(8)]
        await asyncio.gather(*threads, *[database.write(add(f"c{i}")) for i in range(400)])

    asyncio.run(main())
    assert len(names(database)) == 800


WRITES_UNTIL_KILLED = """
import sys
from datetime import UTC, datetime
from store.database.db import Database
from store.tables import Organisation
database = Database(sys.argv[1])
for i in range(1_000_000):
    database.write_now(lambda s: s.add(Organisation(id=f"n{i}", name=f"n{i}", created_at=datetime.now(UTC))))
    print(f"n{i}", flush=True)
"""


def test_kill_9_loses_no_answered_write(database: Database) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITES_UNTIL_KILLED, database.url], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    answered = {writer.stdout.readline().strip() for _ in range(200)}
    writer.send_signal(signal.SIGKILL)
    answered |= {line.strip() for line in writer.stdout if line.endswith("\n")}
    writer.wait()
    assert len(answered) >= 200
    assert answered <= names(database)
