"""What a load balancer and Prometheus see of a server whose PostgreSQL hangs or is gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psycopg
import pytest

from migrations.upgrade import migrate
from store.database.db import Database
from tests.e2e.production import Production
from tests.servers import PostgresServer, free_port, postgres_server

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]


@contextmanager
def frozen(postgres: PostgresServer, database: str) -> Iterator[None]:
    """PostgreSQL hangs: its connections stay open, but nobody answers, as if its machine were suspended."""
    with psycopg.connect(postgres.url(database).replace("+psycopg", "")) as connection:
        shown = connection.execute("SHOW data_directory").fetchone()
        pids = [pid for (pid,) in connection.execute("SELECT pid FROM pg_stat_activity").fetchall()]
        assert shown is not None
        pids.append(int((Path(shown[0]) / "postmaster.pid").read_text().split()[0]))
        pids.remove(connection.info.backend_pid)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_who_watches_is_answered_while_postgresql_is_not_there(tmp_path: Path, redis_url: str) -> None:
    """The server itself goes on answering, in the time of a probe, and its metrics say what is wrong. It stays ready,
    as every other replica does: clients get its answers."""
    with postgres_server() as own:
        _migrate(own)
        made = Production(tmp_path, own.url("weft"), redis_url)
        port = free_port()
        made.config.write_text(f"metrics_port = {port}\n" + made.config.read_text())
        try:
            (url,) = made.serve(1)
            pages, metrics = httpx.Client(base_url=url, timeout=60), f"http://127.0.0.1:{port}/metrics"

            def look() -> tuple[int, str, int, bool]:
                ready = pages.get("/readyz", timeout=5)
                found = httpx.get(metrics, timeout=60).text.splitlines()
                depth = any(line.startswith("weft_queue_depth ") for line in found)
                up = [line for line in found if line.startswith("weft_database_up ")]
                return ready.status_code, up[0], pages.get("/healthz").status_code, depth

            away = (200, "weft_database_up 0.0", 200, False)
            assert look() == (200, "weft_database_up 1.0", 200, True)
            with frozen(own, "weft"):
                assert [look(), look()] == [away, away]
            own.stop()
            assert look() == away
        finally:
            made.close()


def _migrate(postgres: PostgresServer) -> None:
    postgres.execute('CREATE DATABASE "weft"')
    database = Database(postgres.url("weft"))
    migrate(database)
    database.close()
