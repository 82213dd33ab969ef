"""Something expires while another process works on it: between a job's reading and its writing, a replica saves under
the same name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy.orm import Session

from billing.metering import storage
from billing.metering.storage import meter as meter_storage
from scheduler.jobs import reaper
from scheduler.links.messages import OpKind
from scheduler.order.plans import Save
from store import tables
from store.blobs.folder import FolderBlobs
from store.database.db import Database
from tests.scheduler.journal.ending.test_made import PRICES, Desk

NOW = datetime.now(UTC)
#: Long enough for another process to do what nothing holds up.
HELD_UP_S = 0.5


def expire(session: Session) -> int:
    return reaper._expire(session, NOW)


def meter(session: Session) -> int:
    return storage._end_expired(session, NOW)


@pytest.fixture
def desk(postgres_database: Database) -> Desk:
    """A desk with a checkpoint whose time is over."""
    made = Desk(postgres_database)
    made.end(OpKind.SAVE_STATE, Save("weights", "latest", ttl_seconds=60), "one", size_bytes=5)
    made.change(tables.Checkpoint, expires_at=NOW - timedelta(seconds=1))
    return made


@pytest.fixture
def other(desk: Desk) -> Iterator[Database]:
    with closing(Database(desk.database.url)) as database:
        yield database


def meanwhile(
    monkeypatch: pytest.MonkeyPatch, database: Database, job: Callable[[Session], int], work: Callable[[], Any]
) -> None:
    """Run `job`; once it has read what has expired, `work` begins, and has time to end unless it has to wait."""
    begun: list[Future[Any]] = []
    end = storage.end

    def late(*arguments: Any) -> None:
        if not begun:
            begun.append(pool.submit(work))
            wait(begun, HELD_UP_S)
        end(*arguments)

    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patch:
        patch.setattr(storage, "end", late)
        assert database.write_now(job) == 1
    begun[0].result()


@pytest.mark.parametrize("job", [expire, meter])
def test_what_is_saved_under_a_name_that_expires_at_this_moment_stays_and_is_metered(
    desk: Desk, other: Database, job: Callable[[Session], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def save() -> None:
        outcome, _ = desk.end(OpKind.SAVE_STATE, Save("weights", "latest", ttl_seconds=3600), "two", size_bytes=7)
        assert outcome.error is None

    meanwhile(monkeypatch, other, job, save)
    assert [(row.name, row.ref) for row in desk.rows(tables.Checkpoint)] == [("latest", "weights/two")]
    assert [size for _, size, over in desk.stored() if not over] == [7]


def test_more_checkpoints_expire_than_one_write_takes(
    desk: Desk, blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So other writers wait for no more than a part of them."""
    monkeypatch.setattr(storage, "AT_A_TIME", 2)
    for name in "abcd":
        desk.end(OpKind.SAVE_STATE, Save("weights", name), size_bytes=5)
    desk.change(tables.Checkpoint, expires_at=NOW - timedelta(seconds=1))
    meter_storage(desk.database, PRICES, NOW + timedelta(seconds=1))
    assert [size for _, size, over in desk.stored() if not over] == []
    assert reaper.Reaper(desk.database, blobs, lambda: NOW).expire() == 5
    assert desk.rows(tables.Checkpoint) == []
