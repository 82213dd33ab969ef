"""A newer `weftd` is started beside the server of an older one: it does not change the tables under that server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from alembic import command
from click.testing import CliRunner, Result
from sqlalchemy import create_engine

from api.cli import weftd
from api.server.serve import CannotServe, only_one, open_database
from migrations.upgrade import alembic_config, head, revision_of
from store.database.db import Database
from store.settings import Settings

OLDER = "0006"
SERVES = """
import sys
from pathlib import Path
from api.server.serve import only_one
with only_one(Path(sys.argv[1])):
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def older(database: Database, tmp_path: Path) -> str:
    """The URL of a data folder's database as an older server has left it."""
    with create_engine(database.url).connect() as connection, connection.begin():
        command.downgrade(alembic_config(connection), OLDER)
    return database.url


@contextmanager
def another_server(folder: Path) -> Iterator[int]:
    """The process of another server."""
    started = [sys.executable, "-c", SERVES, str(folder)]
    with subprocess.Popen(started, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
        process.stdin.close()


def run(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(weftd, [*arguments, "--data-dir", str(folder)])


@pytest.mark.parametrize("arguments", [("org", "list"), ("migrate",), ("key", "create", "--org", "a")])
def test_tables_that_another_server_has_stay_as_they_are(
    older: str, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    with another_server(tmp_path) as process:
        said = run(tmp_path, *arguments)
        assert said.exit_code == 1  # it may go well later
        assert f"is of revision {OLDER}, and weftd of another version (process {process}) is at work" in said.output
        with pytest.raises(CannotServe, match="another version"):
            open_database(Settings(data_dir=tmp_path))
        assert revision_of(create_engine(older)) == OLDER
    assert run(tmp_path, *arguments).exit_code == 0
    assert revision_of(create_engine(older)) == head()


def test_a_server_brings_its_own_up_to_date(older: str, tmp_path: Path) -> None:
    with only_one(tmp_path), closing(open_database(Settings(data_dir=tmp_path))):
        assert revision_of(create_engine(older)) == head()


def test_commands_of_the_same_version_work_beside_it(database: Database, tmp_path: Path) -> None:
    with another_server(tmp_path):
        assert run(tmp_path, "org", "list").exit_code == 0
