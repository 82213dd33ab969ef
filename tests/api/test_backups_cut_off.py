"""Backups and restores that meet another, fail half-way or are killed: what they leave is whole, or is refused."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from api.server.serve import CannotServe, open_database
from store.blobs.bucket import MARK, Bucket
from store.blobs.folder import FolderBlobs
from store.blobs.opening import check_blobs, open_blobs
from store.database.db import Database
from store.load_settings import load_settings
from tests.api.test_backup_cli import (
    backup as backup,  # a fixture
    backup_command,
    fill,
    own_postgres as own_postgres,  # a fixture
    run,
)
from tests.servers import OwnStore

#: Runs `weftd`, which is killed where the function named first is called.
KILLED = """
import importlib, os, signal, sys
from api.cli import weftd
command = importlib.import_module("api.commands.stored.backup")
setattr(command, sys.argv[1], lambda *_: os.kill(os.getpid(), signal.SIGKILL))
weftd(sys.argv[2:])
"""


def killed_at(function: str, *arguments: str | Path) -> None:
    ran = subprocess.run([sys.executable, "-c", KILLED, function, *map(str, arguments)], check=False)
    assert ran.returncode == -signal.SIGKILL


def first_of(monkeypatch: pytest.MonkeyPatch, function: str, before: Callable[[], Any]) -> None:
    """Do something when a function of the command is called for the first time."""
    called = getattr(backup_command, function)

    def first(*arguments: Any) -> Any:
        monkeypatch.setattr(backup_command, function, called)
        before()
        return called(*arguments)

    monkeypatch.setattr(backup_command, function, first)


def is_whole(kept: Path, new: Path) -> bool:
    put = run("restore", kept, "--data-dir", new)
    assert put.exit_code == 0, put.stderr
    FolderBlobs(new / "blobs").check_folder("weights/one")
    return (new / "weft.db").exists()


def test_of_two_backups_to_one_target_the_second_is_refused(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(database, tmp_path)
    arguments, said = ("backup", tmp_path / "kept", "--data-dir", tmp_path), []
    first_of(monkeypatch, "rows_of", lambda: said.append(run(*arguments)))
    assert run(*arguments).exit_code == 0
    assert (said[0].exit_code, said[0].stderr.count("kept.partial is there already")) == (2, 1)
    assert is_whole(tmp_path / "kept", tmp_path / "new")


def test_a_target_that_came_meanwhile_is_not_replaced_and_the_backup_is_kept(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(database, tmp_path)
    other = tmp_path / "kept" / "other"
    first_of(monkeypatch, "write_sums", lambda: (other.parent.mkdir(), other.write_text("")))
    said = run("backup", tmp_path / "kept", "--data-dir", tmp_path)
    assert said.exit_code == 2
    assert len(said.stderr.splitlines()) == 1
    assert "kept.partial" in said.stderr
    assert other.exists()
    assert is_whole(tmp_path / "kept.partial", tmp_path / "new")


def test_a_backup_that_is_killed_is_not_taken_for_one(database: Database, tmp_path: Path) -> None:
    fill(database, tmp_path)
    arguments = ("backup", tmp_path / "kept", "--data-dir", tmp_path)
    killed_at("rows_of", *arguments)
    assert not (tmp_path / "kept").exists()
    assert "is no backup of weftd" in run("restore", tmp_path / "kept.partial", "--data-dir", tmp_path / "new").stderr
    assert "kept.partial is there already: name a new folder, or delete it first" in run(*arguments).stderr
    shutil.rmtree(tmp_path / "kept.partial")
    assert run(*arguments).exit_code == 0
    assert is_whole(tmp_path / "kept", tmp_path / "new")


@pytest.mark.parametrize("of", ["sqlite", "postgresql"])
def test_what_a_killed_restore_has_left_is_not_served(of: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """As a new service it would delete the files that its empty database does not name."""
    make = request.getfixturevalue("own_postgres") if of == "postgresql" else lambda: f"sqlite:///{tmp_path}/weft.db"
    data, new = (tmp_path, tmp_path / "new") if of == "sqlite" else (tmp_path / "data", tmp_path / "new")
    make()
    with closing(open_database(load_settings(None, data_dir=data))) as database:
        fill(database, data)
    assert run("backup", tmp_path / "kept", "--data-dir", data).exit_code == 0
    make()
    killed_at("put_back", "restore", tmp_path / "kept", "--data-dir", new)
    with pytest.raises(CannotServe, match=f"a restore into {new} was cut off: delete it, and restore the backup again"):
        open_database(load_settings(None, data_dir=new))
    assert f"{new} is not empty" in run("restore", tmp_path / "kept", "--data-dir", new).stderr
    shutil.rmtree(new)
    assert run("restore", tmp_path / "kept", "--data-dir", new).exit_code == 0
    open_database(load_settings(None, data_dir=new)).close()


@pytest.fixture
def kept(database: Database, tmp_path: Path, object_store: OwnStore, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A backup of a service with a bucket; the settings now name an empty prefix of that bucket."""
    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)
    ours, empty = (f"{object_store.url}/{uuid.uuid4().hex}" for _ in range(2))
    fill(database, tmp_path)
    shutil.rmtree(tmp_path / "blobs")
    monkeypatch.setenv("WEFT_BLOB_URL", ours)
    check_blobs(load_settings(None, data_dir=tmp_path))
    with open_blobs(tmp_path, url=ours, cache_bytes=1 << 20).new_folder("weights/one") as folder:
        (folder / "adapter.bin").write_bytes(b"weights")
    made = run("backup", tmp_path / "kept", "--data-dir", tmp_path)
    assert made.exit_code == 0, made.stderr
    monkeypatch.setenv("WEFT_BLOB_URL", empty)
    return tmp_path / "kept"


def below_prefix() -> set[str]:
    return {stored.key.split("/")[0] for stored in Bucket(os.environ["WEFT_BLOB_URL"]).listed("")}


def test_a_restore_into_a_bucket_that_fails_leaves_nothing_there(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        assert below_prefix() == {MARK, "data", "folders", ".restoring"}
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    arguments = ("restore", kept, "--data-dir", tmp_path / "new")
    with monkeypatch.context() as patched:
        patched.setattr(backup_command, "put_back", full)
        assert "No space left" in run(*arguments).stderr
    assert below_prefix() == {MARK}
    assert run(*arguments).exit_code == 0
    assert below_prefix() == {MARK, "data", "folders"}


def test_of_two_restores_into_one_prefix_one_is_done(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []
    first_of(monkeypatch, "put_back", lambda: said.append(run("restore", kept, "--data-dir", tmp_path / "two")))
    assert run("restore", kept, "--data-dir", tmp_path / "one").exit_code == 0
    assert "a restore into it is under way, or was cut off (.restoring is there)" in said[0].stderr
    assert below_prefix() == {MARK, "data", "folders"}
    with open_blobs(tmp_path / "one", url=os.environ["WEFT_BLOB_URL"], cache_bytes=1 << 20).reading(
        "weights/one"
    ) as at:
        assert (at / "adapter.bin").read_bytes() == b"weights"


def test_a_restore_into_a_bucket_that_is_killed_is_named(kept: Path, tmp_path: Path) -> None:
    killed_at("put_back", "restore", kept, "--data-dir", tmp_path / "new")
    said = run("restore", kept, "--data-dir", tmp_path / "again").stderr
    assert "was cut off (.restoring is there): wait, or delete what lies below this prefix" in said
    assert not (tmp_path / "again" / "server.secret").exists()


def test_what_was_restored_stays_though_what_comes_after_fails(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleting the checked copy failed: then the files of a database that was already restored were deleted, too."""

    def denied(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(backup_command.shutil, "rmtree", denied)
        said = run("restore", kept, "--data-dir", tmp_path / "new")
    assert (said.exit_code, "Permission denied" in said.stderr) == (2, True)
    assert below_prefix() == {MARK, "data", "folders"}
    assert (tmp_path / "new" / "weft.db").exists()
    open_database(load_settings(None, data_dir=tmp_path / "new")).close()
