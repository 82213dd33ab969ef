"""Servers that start at the same time on a new database agree on the service's id."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from sqlalchemy.orm import Session

from store.blobs.owner import _service_id
from store.database.db import Database


def test_servers_that_start_at_once_agree_on_one_id(postgres_database: Database) -> None:
    together = Barrier(4)

    def start(_: int) -> str:
        together.wait(10)
        with Session(postgres_database._read_engine) as session, session.begin():
            return _service_id(session)

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(start, range(4)))) == 1
