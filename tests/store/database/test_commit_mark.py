"""A server refuses a database that lacks commits: its log was cut, it is an older copy, or it is gone."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from migrations.upgrade import migrate
from store.database.commit_mark import CommitMark, LostCommits
from store.database.db import Database
from store.tables import Organisation

NOW = datetime.now(UTC)


def add(database: Database, *names: str) -> None:
    for name in names:
        database.write_now(lambda s, name=name: s.add(Organisation(id=name, name=name, created_at=NOW)))  # type: ignore[misc]


@pytest.fixture
def folder(tmp_path: Path, migrated_sqlite: Path) -> Path:
    shutil.copy(migrated_sqlite, tmp_path / "weft.db")
    return tmp_path


def opened(folder: Path) -> Database:
    database = Database(f"sqlite:///{folder / 'weft.db'}")
    migrate(database)
    return database


def test_each_commit_is_counted_and_a_refused_one_is_not(folder: Path) -> None:
    database = opened(folder)
    add(database, "a", "b")
    with pytest.raises(Exception, match="UNIQUE"):
        add(database, "a")
    before = int((folder / "weft.db-commits").read_text())
    add(database, "c")
    assert int((folder / "weft.db-commits").read_text()) == before + 1
    database.close()
    opened(folder).close()


@pytest.mark.parametrize("left", [0.0, 0.25, 0.5, 0.9])
def test_a_log_that_was_cut_is_noticed(folder: Path, left: float) -> None:
    """The files are as kill -9 leaves them, except that the log lacks its end."""
    killed = folder / "killed"
    killed.mkdir()
    database = opened(folder)
    add(database, *(f"p{n}" for n in range(20)))
    for file in folder.glob("weft.db*"):
        shutil.copy(file, killed)
    database.close()
    log = killed / "weft.db-wal"
    data = log.read_bytes()
    log.write_bytes(data[: int(len(data) * left)])
    (killed / "weft.db-shm").unlink(missing_ok=True)
    with pytest.raises(LostCommits, match=r"has lost commits: it stands at \d+, and \d+ were made.*weftd repair"):
        opened(killed)
    mark = CommitMark(killed / "weft.db")
    mark.accept()
    mark.close()
    opened(killed).close()


def test_an_older_copy_is_noticed(folder: Path) -> None:
    database = opened(folder)
    add(database, "a")
    database.close()
    shutil.copy(folder / "weft.db", folder / "backup")
    database = opened(folder)
    add(database, "b")
    database.close()
    shutil.copy(folder / "backup", folder / "weft.db")
    with pytest.raises(LostCommits):
        opened(folder)


def test_a_database_that_is_gone_is_not_begun_anew(folder: Path) -> None:
    database = opened(folder)
    add(database, "a")
    database.close()
    for file in folder.glob("weft.db*"):
        if file.name != "weft.db-commits":
            file.unlink()
    with pytest.raises(LostCommits, match=r"weft\.db is missing in .*put it back from a backup"):
        opened(folder)
    assert not (folder / "weft.db").exists()


def test_the_count_of_commits_wraps_around(tmp_path: Path) -> None:
    assert CommitMark.next(5) == 6
    assert CommitMark.next(2**31 - 1) == 1
