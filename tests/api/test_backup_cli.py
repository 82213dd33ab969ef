"""`weftd backup` and `weftd restore`, in this process: both databases, and backups that must not be restored.
`tests/e2e/test_backup.py` takes one of a real service under load."""

from __future__ import annotations

import errno
import importlib
import itertools
import json
import os
import shutil
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import create_engine, func, inspect, make_url, select, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from api.cli import weftd
from api.server.serve import open_database
from billing.metering.charges import Charge, settle
from billing.money.accounts import Payer
from billing.money.wallets import set_mode
from migrations.upgrade import head, migrate
from store.backup import databases, files
from store.backup.objects import copy_objects, put_objects
from store.blobs.bucket import Bucket
from store.blobs.contract import Blobs
from store.blobs.folder import FolderBlobs
from store.blobs.objects import ObjectBlobs
from store.blobs.opening import check_blobs, open_blobs
from store.blobs.owner import claim_prefix
from store.database.db import Database
from store.load_settings import load_settings
from store.people import organisations
from store.tables import AuditEntry, Checkpoint, JobRun, Organisation, Run, StripeOutbox
from tests.billing.payments.kit import PRICES
from tests.rows import run_row, session_row
from tests.servers import OwnStore, PostgresServer

#: The module has the same name as the command in its package.
backup_command = importlib.import_module("api.commands.stored.backup")
NOW = datetime.now(UTC)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(weftd, [str(argument) for argument in arguments])


def fill(database: Database, data_dir: Path) -> None:
    """Make an organisation with an entry in the audit log and a checkpoint, whose folder exists."""
    with FolderBlobs(data_dir / "blobs").new_folder("weights/one") as folder:
        (folder / "adapter.bin").write_bytes(b"weights")

    def write(session: Session) -> None:
        org = organisations.organisation_named(session, "acme")
        organisations.set_status(session, org, "past_due")
        session.add(session_row(org.id, NOW))
        session.flush()
        session.add(run_row(org.id, NOW, state="closed"))
        session.flush()
        kept = {"ref": "weights/one", "size_bytes": 7, "public": False, "user_metadata": {}, "created_at": NOW}
        session.add(Checkpoint(id="c", org_id=org.id, run_id="s:train:0", kind="weights", name="one", **kept))
        event = {"meter": "train", "period_start": NOW, "identifier": "i", "customer_id": "c", "value_uusd": 5}
        session.add(StripeOutbox(org_id=org.id, occurred_at=NOW, state="pending", next_attempt_at=NOW, **event))
        org.stripe_customer_id = "c"
        set_mode(session, org.id, "postpaid", 0)
        charge = Charge(Payer(org.id), "s", None, "op", "m", NOW, {"train": 5000}, hold_nusd=None)
        settle(session, [charge], PRICES, NOW)

    database.write_now(write)


def assert_nothing_is_sent_twice(session: Session) -> None:
    """Neither the copied service nor we send it again: what Stripe has been told since is asked for."""
    sent = session.scalars(select(StripeOutbox.first_sent_at)).all()
    assert (len(sent), None in sent) == (2, False)
    assert session.get_one(JobRun, "ask_for_missed_events").asked_at is not None


@pytest.fixture
def backup(database: Database, tmp_path: Path) -> Path:
    fill(database, tmp_path)
    made = run("backup", tmp_path / "backup", "--data-dir", tmp_path)
    assert made.exit_code == 0, made.stderr
    return tmp_path / "backup"


def test_sqlite_is_put_back_with_its_files(backup: Path, tmp_path: Path) -> None:
    put = run("restore", backup, "--data-dir", tmp_path / "new")
    assert put.exit_code == 0, put.stderr
    FolderBlobs(tmp_path / "new" / "blobs").check_folder("weights/one")
    database = Database(f"sqlite:///{tmp_path / 'new' / 'weft.db'}")
    with database.read() as session:
        assert session.scalars(select(Organisation.status)).all() == ["past_due"]
        assert_nothing_is_sent_twice(session)
    database.close()
    assert not list((tmp_path / "new").glob(".restoring"))


@pytest.fixture
def own_postgres(
    postgres: PostgresServer, migrated_postgres: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], str]]:
    """Empty databases by URL; the settings name each in turn. The login is no superuser, as in production. The roles
    exist if any migrated database does."""
    names: list[str] = []
    postgres.execute("CREATE ROLE weft_login LOGIN")
    postgres.execute("GRANT weft_app, weft_service TO weft_login")

    def make() -> str:
        names.append(postgres.create())
        postgres.execute(f'ALTER DATABASE "{names[-1]}" OWNER TO weft_login')
        url = postgres.url(names[-1], "weft_login")
        monkeypatch.setenv("WEFT_DATABASE_URL", url)
        return url

    yield make
    for name in names:
        postgres.drop(name)
    postgres.execute("DROP ROLE weft_login")


def test_postgresql_is_put_back_with_its_policies_and_triggers(own_postgres: Callable[[], str], tmp_path: Path) -> None:
    database = Database(own_postgres())
    migrate(database)
    fill(database, tmp_path / "data")
    database.close()
    made = run("backup", tmp_path / "backup", "--data-dir", tmp_path / "data")
    assert made.exit_code == 0, made.stderr
    assert run("restore", tmp_path / "backup", "--data-dir", tmp_path / "other").stderr.count("has tables already") == 1
    url = own_postgres()
    put = run("restore", tmp_path / "backup", "--data-dir", tmp_path / "new")
    assert put.exit_code == 0, put.stderr
    FolderBlobs(tmp_path / "new" / "blobs").check_folder("weights/one")
    restored = Database(url)
    migrate(restored)
    with restored.read() as session:
        assert session.scalar(select(func.count()).select_from(AuditEntry)) == 1
        assert_nothing_is_sent_twice(session)
        session.execute(text("SET LOCAL ROLE weft_app"))  # which sees nothing without an organisation
        assert session.scalar(select(func.count()).select_from(Organisation)) == 0
    with pytest.raises(DBAPIError, match="append-only"):
        restored.write_now(lambda session: session.execute(update(AuditEntry).values(event="x")))
    restored.close()


def test_a_backup_takes_longer_than_the_database_lets_others(
    own_postgres: Callable[[], str], postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Database(url := own_postgres())) as database:
        migrate(database)
        fill(database, tmp_path / "data")
    dumps, counts = databases._postgres, backup_command.rows_of

    def dumps_long(*arguments: str) -> None:
        time.sleep(1)
        dumps(*arguments)

    def counts_long(session: Session) -> dict[str, int]:
        session.execute(text("SELECT pg_sleep(1)"))
        return counts(session)

    monkeypatch.setattr(databases, "_postgres", dumps_long)
    monkeypatch.setattr(backup_command, "rows_of", counts_long)
    for limit in ("idle_in_transaction_session_timeout", "statement_timeout"):
        postgres.execute(f"ALTER DATABASE {make_url(url).database} SET {limit} = '500ms'")
    made = run("backup", tmp_path / "backup", "--data-dir", tmp_path / "data")
    assert made.exit_code == 0, made.stderr


def test_a_backup_that_is_not_whole_is_named_and_not_restored(backup: Path, tmp_path: Path) -> None:
    weights = backup / "blobs" / "weights" / "one" / "adapter.bin"
    for damage, said in ((lambda: weights.write_bytes(b"weightz"), "is damaged"), (weights.unlink, "is missing")):
        damage()
        put = run("restore", backup, "--data-dir", tmp_path / said)
        assert put.exit_code == 2
        assert "blobs/weights/one/adapter.bin" in put.stderr
        assert said in put.stderr
        assert not (tmp_path / said / "weft.db").exists()
    (backup / "SHA256SUMS").unlink()
    assert "is no backup of weftd" in run("restore", backup, "--data-dir", tmp_path / "third").stderr


def test_a_backup_lies_over_nothing(backup: Path, tmp_path: Path) -> None:
    assert "is there already" in run("backup", backup, "--data-dir", tmp_path).stderr
    assert "is not empty" in run("restore", backup, "--data-dir", tmp_path).stderr
    assert "has not been served yet" in run("backup", tmp_path / "two", "--data-dir", tmp_path / "nothing").stderr


def test_without_room_nothing_is_left_and_it_is_said_where(
    backup: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = files._copied

    def full(source: Path, target: Path) -> None:
        copied(source, target)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class Full(sqlite3.Connection):
        def backup(self, *_: object, **__: object) -> None:
            raise sqlite3.OperationalError("database or disk is full")

    two, new = tmp_path / "two", tmp_path / "new"
    with monkeypatch.context() as patched:
        patched.setattr(files, "_copied", full)
        for said, place in (
            (run("backup", two, "--data-dir", tmp_path), f"{two}.partial"),
            (run("restore", backup, "--data-dir", new), new),
        ):
            assert said.exit_code == 1
            remedy = "name a folder that weftd may read and write, on a disk with room"
            assert said.stderr == f"weftd: {place}: No space left on device: {remedy}\n"
    with monkeypatch.context() as patched:
        patched.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Full))
        said = run("backup", two, "--data-dir", tmp_path)
        assert said.exit_code == 1
        where = f"{tmp_path / 'weft.db'} cannot be copied to {two}.partial/weft.db"
        assert said.stderr == f"weftd: {where}: database or disk is full\n"
    assert not list(tmp_path.glob("*.partial"))
    assert run("backup", two, "--data-dir", tmp_path).exit_code == 0
    assert run("restore", backup, "--data-dir", new).exit_code == 0


def test_a_bucket_is_copied_and_put_back_below_another_prefix(
    database: Database, tmp_path: Path, object_store: OwnStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)
    ours, theirs = (f"{object_store.url}/{uuid.uuid4().hex}" for _ in range(2))
    fill(database, tmp_path)
    shutil.rmtree(tmp_path / "blobs")
    monkeypatch.setenv("WEFT_BLOB_URL", ours)
    check_blobs(load_settings(None, data_dir=tmp_path))
    blobs = open_blobs(tmp_path, url=ours, cache_bytes=1 << 20)
    with blobs.new_folder("weights/one") as folder:
        (folder / "adapter.bin").write_bytes(b"weights")
        (folder / "deep").mkdir()
        (folder / "deep" / "more").write_bytes(b"")
    blobs.put("ops/o/body", b"asked")
    blobs.put("archives/a", b"can be made again")
    claim_prefix(load_settings(None, data_dir=tmp_path), database)
    made = run("backup", tmp_path / "backup", "--data-dir", tmp_path)
    assert made.exit_code == 0, made.stderr
    assert "is not empty" in run("restore", tmp_path / "backup", "--data-dir", tmp_path / "new").stderr
    monkeypatch.delenv("WEFT_BLOB_URL")
    assert (
        "set blob_url to an empty prefix" in run("restore", tmp_path / "backup", "--data-dir", tmp_path / "new").stderr
    )
    monkeypatch.setenv("WEFT_BLOB_URL", theirs)
    put = run("restore", tmp_path / "backup", "--data-dir", tmp_path / "new")
    assert put.exit_code == 0, put.stderr
    back = open_blobs(tmp_path / "elsewhere", url=theirs, cache_bytes=1 << 20)
    assert back.get("ops/o/body") == b"asked"
    assert not back.exists("archives/a")
    with back.reading("weights/one") as folder:
        assert (folder / "adapter.bin").read_bytes() == b"weights"
        assert (folder / "deep" / "more").is_file()
    with closing(open_database(load_settings(None, data_dir=tmp_path / "new"))) as restored:
        claim_prefix(load_settings(None, data_dir=tmp_path / "new"), restored)
    blobs.delete_tree("weights/one")
    made = run("backup", tmp_path / "two", "--data-dir", tmp_path, "--config", empty_config(tmp_path, ours))
    assert made.exit_code == 1
    assert "weights/one" in made.stderr


def empty_config(folder: Path, url: str) -> Path:
    (folder / "weft.toml").write_text(f'blob_url = "{url}"\n')
    return folder / "weft.toml"


def test_a_damaged_list_of_a_folder_is_listed_and_all_else_is_copied(
    database: Database, tmp_path: Path, object_store: OwnStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)
    url = f"{object_store.url}/{uuid.uuid4().hex}"
    monkeypatch.setenv("WEFT_BLOB_URL", url)
    fill(database, tmp_path)
    shutil.rmtree(tmp_path / "blobs")
    check_blobs(load_settings(None, data_dir=tmp_path))
    blobs = open_blobs(tmp_path, url=url, cache_bytes=1 << 20)
    for ref in ("weights/one", "weights/two"):
        with blobs.new_folder(ref) as folder:
            (folder / "adapter.bin").write_bytes(b"weights")
    bucket = Bucket(url)
    bucket.put("folders/weights/one", bucket.get("folders/weights/one")[:-1])
    bucket.put("data/weights/two/of-a-dead-writer/adapter.bin", b"nobody's")
    made = run("backup", tmp_path / "backup", "--data-dir", tmp_path)
    assert made.exit_code == 1
    assert "weights/one" in made.stderr
    copied = {
        file.relative_to(tmp_path / "backup/objects").as_posix()
        for file in (tmp_path / "backup/objects").rglob("*")
        if file.is_file()
    }
    assert {name for name in copied if name.startswith("folders/")} == {"folders/weights/two"}
    assert [name.split("/")[2] for name in copied if name.startswith("data/")] == ["two"]
    assert not any("of-a-dead-writer" in name for name in copied)


def test_a_folder_that_is_replaced_while_it_is_copied_is_copied_again(
    tmp_path: Path, object_store: OwnStore, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = ObjectBlobs(bucket, tmp_path / "cache", 1 << 20)

    def write(text: bytes) -> None:
        with blobs.new_folder("weights/one") as folder:
            (folder / "adapter.bin").write_bytes(text)

    write(b"before")
    download, sums = Bucket.download, dict[str, str]()

    def replaced_at_once(self: Bucket, key: str, target: Path) -> None:
        download(self, key, target)
        if key.startswith("folders/"):
            write(b"after")

    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "download", replaced_at_once)
        copy_objects(bucket, tmp_path / "backup", sums)
    assert not any("folders/" in name for name in sums)
    copy_objects(bucket, tmp_path / "backup", sums)
    assert {name for name in sums if "folders/" in name} == {"objects/folders/weights/one"}
    new = Bucket(f"{object_store.url}/{uuid.uuid4().hex}")
    put_objects(new, tmp_path / "backup", sums)
    new.check()
    with ObjectBlobs(new, tmp_path / "cache2", 1 << 20).reading("weights/one") as folder:
        assert (folder / "adapter.bin").read_bytes() == b"after"


@pytest.fixture(params=["sqlite and folder", "postgresql and folder", "sqlite and bucket"])
def any_service(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Database, Blobs]]:
    """The service, on a folder or a bucket, that `weftd backup --data-dir tmp_path` copies."""
    url = request.getfixturevalue("bucket").url if request.param.endswith("bucket") else ""
    monkeypatch.setenv("WEFT_BLOB_URL", url)
    sqlite = request.param.startswith("sqlite")
    address = f"sqlite:///{tmp_path}/weft.db" if sqlite else request.getfixturevalue("own_postgres")()
    with closing(Database(address)) as database:
        migrate(database)
        yield database, open_blobs(tmp_path, url=url, cache_bytes=1 << 20)


def test_what_is_replaced_whenever_a_backup_takes_long_is_in_it_all_the_same(
    any_service: tuple[Database, Blobs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's newest state replaces the one before: between the copies of files and database, and while the database is
    dumped or checked."""
    database, blobs = any_service
    states = itertools.count()

    def add_run(session: Session) -> None:
        org = organisations.organisation_named(session, "acme")
        session.add(session_row(org.id, NOW))
        session.flush()
        session.add(run_row(org.id, NOW))

    def replace() -> None:
        ref = f"runs/s:train:0/state-{next(states)}"
        with blobs.new_folder(ref) as folder:
            (folder / "adapter.bin").write_bytes(ref.encode())
        old = database.write_now(lambda session: session.scalars(select(Run.snapshot_ref)).one())
        database.write_now(lambda session: session.execute(update(Run).values(snapshot_ref=ref)))
        if old is not None:
            blobs.delete_tree(old)

    def replaced_before(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            replace()
            return function(*arguments)

        return called

    database.write_now(add_run)
    replace()
    monkeypatch.setattr(backup_command, "saved", replaced_before(backup_command.saved))
    for takes_long in ("check_sqlite", "_postgres"):
        monkeypatch.setattr(databases, takes_long, replaced_before(getattr(databases, takes_long)))
    made = run("backup", tmp_path / "backup", "--data-dir", tmp_path)
    assert made.exit_code == 0, made.stderr
    assert "runs/s:train:0/state-1/" in (tmp_path / "backup" / "SHA256SUMS").read_text()


def test_files_that_are_missing_at_home_are_named(database: Database, tmp_path: Path) -> None:
    fill(database, tmp_path)
    FolderBlobs(tmp_path / "blobs").delete_tree("weights/one")
    made = run("backup", tmp_path / "backup", "--data-dir", tmp_path)
    assert made.exit_code == 1
    assert "weights/one" in made.stderr
    assert json.loads((tmp_path / "backup" / "backup.json").read_text())["missing"] == ["weights/one"]


def test_tables_and_backups_of_another_version_are_refused(backup: Path, database: Database, tmp_path: Path) -> None:
    """Both ways into the same trouble: a newer program's folder or backup, and an older program."""
    about = json.loads((backup / "backup.json").read_text())
    (backup / "backup.json").write_text(json.dumps(about | {"revision": "0999"}))
    put = run("restore", backup, "--data-dir", tmp_path / "new")
    with closing(sqlite3.connect(tmp_path / "weft.db")) as writing, writing:
        writing.execute("update alembic_version set version_num = '0999'")
    for refused in (
        put,
        run("org", "list", "--data-dir", tmp_path),
        run("backup", tmp_path / "b", "--data-dir", tmp_path),
    ):
        assert refused.exit_code == 2
        assert f"is of revision 0999, and this weftd knows revisions up to {head()}" in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
    with create_engine(database.url).connect() as connection:
        assert inspect(connection).get_table_names()  # unchanged
