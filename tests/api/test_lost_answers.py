"""An operator's command whose COMMIT succeeds or fails, but whose answer from the database is lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import Engine, event, select, text

from api.cli import weftd
from billing.money.wallets import wallet_of
from store.database import sure
from store.database.bulk import take_locks
from store.database.db import Database
from store.people.keys import find
from store.tables import ApiKey, Organisation
from tests.keys import create_key
from tests.scheduler.jobs.proxy import proxy
from tests.servers import PostgresServer

ACME = ("--org", "acme")
#: PostgreSQL's answer to COMMIT.
COMMITTED = b"C\x00\x00\x00\x0bCOMMIT"
#: Commands that would take effect twice if they were repeated.
TWICE = {
    "grant": (("credit", "grant", *ACME, "--usd", "10"), 10 * 10**9),
    "take": (("credit", "take", *ACME, "--usd", "10", "--memo", "why"), -10 * 10**9),
}


def run(config: Path, *command: str) -> Result:
    return CliRunner().invoke(weftd, [*command, "--config", str(config)])


def configured(postgres: PostgresServer, database: Database, port: int, folder: Path) -> Path:
    config = folder / "weft.toml"
    url = database.url.replace(str(postgres.port), str(port))
    config.write_text(f'data_dir = "{folder}"\ndatabase_url = "{url}"\n')
    return config


@contextmanager
def at_the_last_statement(then: Callable[[], None]) -> Iterator[None]:
    """The audit log is written right before COMMIT."""

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("INSERT INTO audit_log"):
            then()

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield
    finally:
        event.remove(Engine, "before_cursor_execute", note)


@pytest.fixture
def acme(postgres_database: Database) -> str:
    """The id of an organisation."""
    postgres_database.write_now(lambda session: create_key(session, "acme"))
    with postgres_database.read() as session:
        return session.scalars(select(Organisation.id)).one()


def balance_nusd(database: Database, org_id: str) -> int:
    return database.write_now(lambda session: wallet_of(session, org_id).balance_nusd)


@pytest.mark.parametrize("what", sorted(TWICE))
def test_moved_money_is_reported_as_moved(
    what: str, postgres: PostgresServer, postgres_database: Database, acme: str, tmp_path: Path
) -> None:
    """An operator who is told that the money was not moved would move it again."""
    command, moved_nusd = TWICE[what]
    with proxy(postgres.port) as between:
        config = configured(postgres, postgres_database, between.port, tmp_path)
        with at_the_last_statement(lambda: setattr(between, "losing", COMMITTED)):
            said = run(config, *command)
    assert between.losing == b""
    assert (said.exit_code, balance_nusd(postgres_database, acme)) == (0, moved_nusd)


def test_a_key_that_was_made_is_shown(postgres: PostgresServer, postgres_database: Database, tmp_path: Path) -> None:
    """It cannot be shown again."""
    with proxy(postgres.port) as between:
        config = configured(postgres, postgres_database, between.port, tmp_path)
        with at_the_last_statement(lambda: setattr(between, "losing", COMMITTED)):
            said = run(config, "key", "create", "--org", "new")
    assert (said.exit_code, between.losing) == (0, b"")
    with postgres_database.read() as session:
        assert find(session, said.output.strip()) is not None
        assert len(session.scalars(select(ApiKey)).all()) == 1


@pytest.mark.parametrize("what", sorted(TWICE))
def test_what_was_not_done_is_reported_as_not_done(
    what: str, postgres: PostgresServer, postgres_database: Database, acme: str, tmp_path: Path
) -> None:
    command, moved_nusd = TWICE[what]
    with proxy(postgres.port) as between:
        config = configured(postgres, postgres_database, between.port, tmp_path)
        with at_the_last_statement(lambda: setattr(between, "losing", b"INSERT")):
            said = run(config, *command)
        assert between.losing == b""
        assert (said.exit_code, balance_nusd(postgres_database, acme)) == (1, 0)
        assert "does not do it" in said.output
        assert run(config, *command).exit_code == 0
    assert balance_nusd(postgres_database, acme) == moved_nusd


def test_an_unknown_outcome_is_reported_as_unknown(
    postgres: PostgresServer,
    postgres_database: Database,
    acme: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sure, "PATIENCE_S", 0.5)
    command, moved_nusd = TWICE["grant"]
    with proxy(postgres.port) as between:
        config = configured(postgres, postgres_database, between.port, tmp_path)
        between.then_gone = True
        with at_the_last_statement(lambda: setattr(between, "losing", COMMITTED)):
            said = run(config, *command)
    assert balance_nusd(postgres_database, acme) == moved_nusd
    assert said.exit_code == 2
    assert "may or may not have done it" in said.output


def test_what_was_given_up_is_not_done(postgres_database: Database, acme: str, tmp_path: Path) -> None:
    """Ctrl-C while the command waits for others: an operator who is told that it was aborted types it again."""
    (tmp_path / "weft.toml").write_text(f'data_dir = "{tmp_path}"\ndatabase_url = "{postgres_database.url}"\n')
    command = [sys.executable, "-m", "weft_server", *TWICE["grant"][0], "--config", str(tmp_path / "weft.toml")]
    with postgres_database.read() as busy:
        take_locks(busy, [acme])
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as started:
            while not waiting_for_locks(postgres_database):
                assert started.poll() is None
                time.sleep(0.05)
            started.send_signal(signal.SIGINT)
            time.sleep(0.2)
            busy.rollback()
            said, _ = started.communicate(timeout=60)
    assert (started.returncode, balance_nusd(postgres_database, acme)) == (1, 0), said


def waiting_for_locks(database: Database) -> int:
    with database.ask() as connection:
        return int(connection.scalar(text("SELECT count(*) FROM pg_locks WHERE NOT granted")) or 0)
