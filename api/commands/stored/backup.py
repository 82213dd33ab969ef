"""`weftd backup` and `weftd restore`: all that a service is made of, copied while it runs, and put back elsewhere.

A row is committed after the files that it names are written, so what a copy of the database names is in the data folder
or the bucket unless it was deleted since. Files are copied, then the database, and at once those of its files that came
meanwhile; when one of them was deleted in between (a snapshot that another has replaced), the database is copied again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.orm import Session
from weft.version import __version__

from api.commands.places import Place, code_of, refuse, settings_of, where
from store.backup.databases import file_name, is_empty, opened, put_back, rows_of, saved
from store.backup.files import RESTORING, BadBackup, copy_checked, copy_new, digest_of, read_sums, write_sums
from store.logs import in_a_line
from store.settings import Settings, SettingsError

if TYPE_CHECKING:
    from store.blobs.bucket import Bucket

T = TypeVar("T")

#: How often the database is copied before a missing file is taken to be missing in the data folder, too.
ROUNDS = 5
_ABOUT = "backup.json"


@dataclass(frozen=True)
class About:
    """The description in a backup. `rows` are the number of rows of each table."""

    weft: str
    made_at: str
    revision: str
    database: str
    rows: dict[str, int]
    missing: list[str]


@click.command()
@where
@click.argument("target", type=click.Path(path_type=Path))
def backup(place: Place, target: Path) -> None:
    """Copy database, blobs and secret into the new folder TARGET; the service may run.

    TARGET must not exist; it appears only once it is complete. Prints what is in it. Exit code 1: some files named in
    the database are missing from the data folder (or the bucket) and are listed; everything else is in the backup."""
    settings = settings_of(place)
    if not target.name:
        refuse("TARGET: name a new folder")
    partial = target.with_name(f"{target.name}.partial")
    if target.exists() or partial.exists():
        refuse(f"{target if target.exists() else partial} is there already: name a new folder, or delete it first")
    about, files = _told(lambda: _backup(settings, partial), partial)
    os.sync()
    _told(lambda: partial.rename(target), target)
    click.echo(f"{target}\t{files} files\trevision {about.revision}\t{sum(about.rows.values())} rows\t{about.made_at}")
    if about.missing:
        click.echo(f"weftd: missing in the data folder, and so in the backup: {', '.join(about.missing)}", err=True)
        raise SystemExit(1)


def _backup(settings: Settings, target: Path) -> tuple[About, int]:
    from store.database.commit_mark import CommitMark

    bucket = _bucket(settings)
    url = settings.effective_database_url
    if is_empty(url):
        raise BadBackup(f"there is no database to back up: {settings.data_dir} has not been served yet")
    mark = CommitMark.of(url)
    if mark is not None:
        mark.check()
    target.mkdir(parents=True)
    with _whole_or_gone(target):
        return _filled(settings, bucket, target)


def _filled(settings: Settings, bucket: Bucket | None, target: Path) -> tuple[About, int]:
    from migrations.upgrade import refuse_unknown, revision_in
    from scheduler.journal.ending.references import needed_files

    url = settings.effective_database_url
    kept, sums = target / file_name(url), dict[str, str]()
    _copy(settings, bucket, target, sums)
    for _ in range(ROUNDS):
        kept.unlink(missing_ok=True)
        made_at = datetime.now(UTC).isoformat(timespec="seconds")
        with saved(url, kept) as session:
            refuse_unknown(revision := str(revision_in(session.connection())), "the database")
            needed = needed_files(session)
            _copy(settings, bucket, target, sums, _missing(target, needed))
            rows = rows_of(session)
        if not (missing := _missing(target, needed)):
            break
    _copy(settings, bucket, target, sums)
    sums[kept.name] = digest_of(kept)
    about = About(__version__, made_at, revision, kept.name, rows, missing)
    (target / _ABOUT).write_text(json.dumps(asdict(about), indent=2) + "\n")
    sums[_ABOUT] = digest_of(target / _ABOUT)
    write_sums(target, sums)
    return about, len(sums)


@click.command()
@where
@click.argument("source", type=click.Path(path_type=Path))
def restore(place: Place, source: Path) -> None:
    """Put the backup SOURCE back into a new data folder (and into a PostgreSQL without tables, if the settings name
    one).

    Checks every file against its recorded SHA-256, and counts the rows of every table."""
    settings = settings_of(place)
    about = _told(lambda: _restore(settings, source), settings.data_dir)
    click.echo(f"{settings.data_dir} is as of {about.made_at}\t{sum(about.rows.values())} rows")


def _restore(settings: Settings, source: Path) -> About:
    from api.server.serve import only_one
    from migrations.upgrade import refuse_unknown

    bucket = _bucket(settings)
    sums, about = read_sums(source), _about(source)
    url, data_dir = settings.effective_database_url, settings.data_dir
    refuse_unknown(about.revision, f"the backup {source}")
    if about.database != file_name(url):
        raise BadBackup(
            f"{source} holds {about.database}, and the settings name another kind of database: {file_name(url)}"
        )
    if data_dir.exists() and any(found.name != "server.lock" for found in data_dir.iterdir()):
        raise BadBackup(f"{data_dir} is not empty: name a new folder")
    if not is_empty(url):
        raise BadBackup("the database of the settings has tables already: name an empty one")
    _same_place(source, bucket)
    coming = data_dir / RESTORING
    made = (coming, *(data_dir / name for name in ("blobs", "server.secret", "weft.db")))
    with only_one(data_dir):
        with _whole_or_gone(*made):
            copy_checked(source, coming, sums)
            for found in ("blobs", "server.secret"):
                if (coming / found).exists():
                    (coming / found).rename(data_dir / found)
            with _objects_put(bucket, coming, sums):
                # from here on the backup is restored, whatever happens to this file
                rows = put_back(url, coming / about.database)
                _note_restored(url, about)
        shutil.rmtree(coming)
    wrong = [name for name in about.rows if rows.get(name) != about.rows[name]]
    if wrong:
        raise BadBackup(
            f"the restored database is not the one that was saved: {', '.join(wrong)} have other numbers of rows"
        )
    return about


def _note_restored(url: str, about: About) -> None:
    from billing.payments.sender import restored
    from scheduler.jobs.running import ask

    now = datetime.now(UTC)
    with opened(url) as engine, Session(engine) as session, session.begin():
        restored(session, datetime.fromisoformat(about.made_at), now)
        ask(session, "ask_for_missed_events", now)


@contextmanager
def _whole_or_gone(*made: Path) -> Iterator[None]:
    """If the block fails, delete what it has made, so that a full disk gets no fuller and the operator can try
    again."""
    try:
        yield
    except BaseException:
        for path in made:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        raise


def _bucket(settings: Settings) -> Bucket | None:
    """The bucket with the blobs; None if they are in the data folder."""
    if not settings.blob_url:
        return None
    from store.blobs.bucket import Bucket

    return Bucket(settings.blob_url)


def _copy(
    settings: Settings, bucket: Bucket | None, target: Path, sums: dict[str, str], refs: Sequence[str] | None = None
) -> None:
    """Copy blobs that are not copied yet; with `refs` only these."""
    copy_new(settings.data_dir, target, sums, refs)
    if bucket is not None:
        from store.backup.objects import copy_objects

        copy_objects(bucket, target, sums, refs)


def _objects_put(bucket: Bucket | None, source: Path, sums: dict[str, str]) -> AbstractContextManager[None]:
    if bucket is None:
        return nullcontext()
    from store.backup.objects import objects_put

    return objects_put(bucket, source, sums)


def _missing(backup: Path, needed: set[str]) -> list[str]:
    places = [backup / place for place in ("blobs", "objects/files", "objects/folders")]
    return sorted(ref for ref in needed if not any((place / ref).exists() for place in places))


def _same_place(source: Path, bucket: Bucket | None) -> None:
    """Refuse to restore anywhere but into the same kind of place, and only into an empty one."""
    if (source / "objects").exists() and bucket is None:
        raise BadBackup(f"{source} is of a service with an object store: set blob_url to an empty prefix")
    if (source / "blobs").exists() and bucket is not None:
        raise BadBackup(f"{source} is of a service with its blobs in a folder: leave blob_url out")
    if bucket is not None:
        from store.backup.objects import refuse_objects

        bucket.check()
        refuse_objects(bucket)


def _about(source: Path) -> About:
    try:
        return About(**json.loads((source / _ABOUT).read_text()))
    except (OSError, TypeError, ValueError) as error:
        raise BadBackup(f"{source / _ABOUT} cannot be read: {error}") from None


def _told(work: Callable[[], T], place: Path) -> T:
    """Report errors of the block in one line; it writes to `place`."""
    from api.server.serve import CannotServe
    from migrations.upgrade import CannotMigrate
    from store.database.commit_mark import LostCommits

    try:
        return work()
    except (BadBackup, CannotServe, LostCommits, SettingsError, CannotMigrate) as error:
        refuse(error)
    except OSError as error:
        if not error.errno:  # an error of the object store, whose text says what to do
            refuse(error)
        what = f"{error.filename or place}: {error.strerror}"
        refuse(f"{what}: name a folder that weftd may read and write, on a disk with room", code_of(error))
    except SQLAlchemyError as error:
        refuse(in_a_line(error), 1 if isinstance(error, OperationalError) else 2)
