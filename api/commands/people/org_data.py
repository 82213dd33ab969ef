"""`weftd org export` and `weftd org delete`: export everything that an organisation owns, and delete it.

Deleting takes rows and files of work and of people, and leaves money's records and the audit trail
(`store.database.owned`). Weights that another organisation has copied stay for it: a folder goes when nobody needs it.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from sqlalchemy import delete as delete_rows, func, or_, select
from sqlalchemy.orm import Session

from api.commands.changes import change, organisation
from api.commands.places import Place, blobs_to_change, code_of, database_of, refuse, settings_of, where
from api.http.archives import archive_ref
from billing.metering import storage
from scheduler.journal.ending.outcomes import payload_of
from scheduler.journal.ending.references import in_use
from store import tables
from store.backup.files import digest_of, write_sums
from store.blobs.contract import Blobs, Damaged, files_of
from store.blobs.opening import blobs_of
from store.database import audit
from store.database.owned import DELETED, rows_of
from store.people.keys import revoke_row
from store.people.organisations import PeopleError
from store.settings import Settings
from store.tables import Checkpoint, Operation, Organisation, Run, Sampler, SessionTurn

_README = """What {name} owned on this service at {at}.

tables/       one JSON object a line for each row, in a file for each table; money is in nano-dollars
checkpoints/  RUN/KIND/NAME: the weights, as the service keeps them
operations/   ID.body is what a client sent, ID.result what it was answered, as far as they are still kept
telemetry/    DAY.jsonl: what clients reported about themselves
SHA256SUMS    of every file, for sha256sum --check
"""


@click.command()
@where
@click.argument("name")
@click.argument("target", type=click.Path(path_type=Path))
def export(place: Place, name: str, target: Path) -> None:
    """Write all data of the organisation NAME into the new folder TARGET. The service may run.

    TARGET must not exist; it appears only once it is complete."""
    settings = settings_of(place)
    if target.exists():
        refuse(f"{target} is there already: name a new folder")
    partial = target.with_name(f"{target.name}.partial")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        refuse(f"cannot write to {partial}: {error.strerror}", code_of(error))
    try:
        with database_of(place) as database, database.read() as session:
            rows, missing = _export_rows_and_files(session, settings, name, partial)
        files = files_of(partial)
        write_sums(partial, {file: digest_of(partial / file) for file in files})
        partial.rename(target)
    except OSError as error:
        refuse(f"nothing was exported: {error}", code_of(error))
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    click.echo(f"{target}\t{rows} rows\t{len(files)} files\t{missing} that are not kept any more")


def _export_rows_and_files(session: Session, settings: Settings, name: str, target: Path) -> tuple[int, int]:
    """Write the export. Returns how many rows it has, and how many of the files that rows name are no longer kept."""
    blobs = blobs_of(settings)
    org = organisation(session, name)
    rows = _export_rows(session, org.id, target / "tables")
    missing = sum(not _copy_folder(blobs, ref, target / place) for ref, place in _folders(session, org.id))
    missing += sum(not _copy_file(blobs, ref, target / place) for ref, place in _files(session, org.id))
    for data, place in _small(session, org.id):
        _write(target / place, data)
    for file in settings.data_dir.glob(f"telemetry/*/{org.id}.jsonl"):
        _write(target / "telemetry" / f"{file.parent.name}.jsonl", file.read_bytes())
    (target / "README").write_text(_README.format(name=name, at=datetime.now(UTC).isoformat(timespec="seconds")))
    return rows, missing


def _export_rows(session: Session, org_id: str, folder: Path) -> int:
    folder.mkdir(parents=True)
    count = 0
    for table, query in rows_of(org_id):
        with (folder / f"{table}.jsonl").open("w") as file:
            for row in session.execute(query.execution_options(yield_per=1000)).mappings():
                file.write(json.dumps(dict(row), default=_as_json) + "\n")
                count += 1
    return count


def _as_json(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _folders(session: Session, org_id: str) -> Iterator[tuple[str, str]]:
    """(folder blob, its place in the export) of every checkpoint."""
    for row in session.scalars(select(Checkpoint).filter_by(org_id=org_id)):
        yield row.ref, f"checkpoints/{row.run_id}/{row.kind}/{row.name}"


def _files(session: Session, org_id: str) -> Iterator[tuple[str, str]]:
    """(file blob, its path in the export) of the bodies and results of operations."""
    for op in session.scalars(select(Operation).filter_by(org_id=org_id)):
        if op.body_ref:
            yield op.body_ref, f"operations/{op.id}.body"
        if op.result_ref and op.result_bytes is not None:
            yield op.result_ref, f"operations/{op.id}.result"


def _small(session: Session, org_id: str) -> Iterator[tuple[bytes, str]]:
    """(data, its path in the export) of bodies and results that lie in operations' rows."""
    columns = Operation.id, Operation.body, Operation.result, Operation.result_type
    kept = or_(Operation.body.is_not(None), Operation.result.is_not(None))
    query = select(*columns).where(Operation.org_id == org_id, kept)
    for op_id, body, result, result_type in session.execute(query.execution_options(yield_per=1000)):
        if body is not None:
            yield body.encode(), f"operations/{op_id}.body"
        if result is not None:
            yield payload_of(result, result_type), f"operations/{op_id}.result"


def _copy_folder(blobs: Blobs, ref: str, target: Path) -> bool:
    """Copy a folder. False if it is missing or incomplete."""
    try:
        with blobs.reading(ref) as folder:
            for name in files_of(folder):
                _write(target / name, (folder / name).read_bytes())
    except (FileNotFoundError, Damaged):
        return False
    return True


def _copy_file(blobs: Blobs, ref: str, target: Path) -> bool:
    """Copy a file. False if it is missing or damaged."""
    try:
        _write(target, blobs.get(ref))
    except (FileNotFoundError, Damaged):
        return False
    return True


def _write(file: Path, data: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)


@dataclass
class _Gone:
    """What a deletion removed from the database: the number of rows by table, and the files to delete next."""

    org_id: str
    rows: Counter[str]
    trees: list[str]


@click.command()
@where
@click.argument("name")
@click.option("--confirm", required=True, metavar="NAME", help="The name once more: this cannot be undone.")
def delete(place: Place, name: str, confirm: str) -> None:
    """Delete the data of the closed organisation NAME: runs, weights, operations, sessions, members, names of keys.

    Payments and the audit log are kept as long as the law requires (docs/tenancy.md). Prints what was deleted."""
    if confirm != name:
        refuse(f"--confirm must be the name again, {name!r}")
    settings = settings_of(place)
    with database_of(place) as database:
        blobs = blobs_to_change(settings, database)
    gone = change(place, lambda session: _delete(session, organisation(session, name), blobs))
    for ref in gone.trees:
        blobs.delete_tree(ref)
    for file in settings.data_dir.glob(f"telemetry/*/{gone.org_id}.jsonl"):
        file.unlink()
    for table, count in gone.rows.items():
        click.echo(f"{table}\t{count}")
    click.echo(f"files\t{len(gone.trees)}")


def _delete(session: Session, org: Organisation, blobs: Blobs) -> _Gone:
    if org.status != "closed":
        first = f"weftd org export {org.name} TARGET; weftd org status {org.name} closed"
        raise PeopleError(f"{org.name} is {org.status}, and only closed ones are deleted. First: {first}")
    count = select(func.count())
    queued = count.select_from(Operation).filter_by(org_id=org.id, state="queued")
    active = count.select_from(tables.Session).filter_by(org_id=org.id, state="active")
    for what, query in (("operations are queued", queued), ("sessions are active", active)):
        if left := session.scalar(query):
            raise PeopleError(f"{left} {what}: they end by themselves within session_idle_s; try again then")
    now = datetime.now(UTC)
    storage.end(session, session.scalars(select(Checkpoint).filter_by(org_id=org.id)).all(), now)
    weights, trees = _weights(session, org.id), _trees(session, org.id, blobs)
    rows = Counter[str]()
    people = session.scalars(select(tables.Membership.user_id).filter_by(org_id=org.id)).all()
    for table in DELETED:
        taken = session.connection().execute(delete_rows(table).where(table.__table__.c.org_id == org.id))
        rows[table.__tablename__] = taken.rowcount
    _forget_people(session, org, people)
    org.name = f"deleted-{org.id}"
    detail = {"rows": dict(rows)}
    audit.record(session, org_id=org.id, key_id=None, event="organization_data_deleted", target=org.id, detail=detail)
    trees += [tree for ref in weights if not in_use(session, ref) for tree in (ref, archive_ref(ref))]
    return _Gone(org.id, rows, [tree for tree in trees if blobs.exists(tree)])


def _weights(session: Session, org_id: str) -> set[str]:
    found = {ref for ref in session.scalars(select(Checkpoint.ref).filter_by(org_id=org_id))}
    return found | {ref for ref in session.scalars(select(Sampler.adapter_ref).filter_by(org_id=org_id)) if ref}


def _trees(session: Session, org_id: str, blobs: Blobs) -> list[str]:
    """Folders of files that no other organisation can need."""
    found: list[str | None] = [f"runs/{run}" for run in session.scalars(select(Run.id).filter_by(org_id=org_id))]
    for column in (Operation.body_ref, Operation.result_ref):
        found += session.scalars(select(column).where(Operation.org_id == org_id)).all()
    found += session.scalars(select(SessionTurn.ref).filter_by(org_id=org_id)).all()
    for session_id in session.scalars(select(tables.Session.id).filter_by(org_id=org_id)):
        found += blobs.listed(f"losses/{session_id}:*")
        found.append(f"stability/{session_id}")
    return [ref for ref in found if ref]


def _forget_people(session: Session, org: Organisation, members: Sequence[str]) -> None:
    """Revoke the keys and drop their names, rename projects to their ids, and delete people who are in no other
    organisation."""
    for key in session.scalars(select(tables.ApiKey).filter_by(org_id=org.id)):
        if key.revoked_at is None:
            revoke_row(session, key)
        key.name, key.user_id, key.given_to, key.previous_sha256 = "", None, None, None
    for project in session.scalars(select(tables.Project).filter_by(org_id=org.id)):
        project.name = project.id
    session.flush()
    elsewhere = set(session.scalars(select(tables.Membership.user_id).where(tables.Membership.user_id.in_(members))))
    gone = set(members) - elsewhere
    session.execute(delete_rows(tables.Identity).where(tables.Identity.user_id.in_(gone)))
    session.execute(delete_rows(tables.User).where(tables.User.id.in_(gone)))
