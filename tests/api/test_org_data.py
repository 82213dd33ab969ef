"""`weftd org export` writes, and `weftd org delete` removes, all of an organisation, and nothing of its neighbour."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from api.cli import weftd
from billing.metering.charges import Charge, settle
from billing.metering.storage import begin, meter
from billing.money.accounts import Payer
from billing.prices import load_prices
from store import tables
from store.blobs.contract import Blobs
from store.database import audit
from store.database.db import Database
from store.database.owned import DELETED, KEPT
from store.people import organisations
from store.people.keys import new_key
from store.tables import Base, Checkpoint, LedgerEntry, Operation, Organisation, UsageEvent, User
from tests.rows import run_row, session_row

NOW = datetime.now(UTC)


def run(data_dir: Path, *arguments: str | Path) -> Result:
    command = ["org", *map(str, arguments), "--data-dir", str(data_dir)]
    return CliRunner().invoke(weftd, command)


def work(database: Database, blobs: Blobs, name: str, weights: str, *emails: str) -> str:
    """Make an organisation with members, a key, a run, a billed operation and a checkpoint; returns its id."""
    with blobs.new_folder(weights) as folder:
        (folder / "adapter.bin").write_bytes(f"of {name}".encode())
    for ref in (f"ops/00/{name}", f"results/00/{name}"):
        blobs.put(ref, f"tokens of {name}".encode())
    blobs.put(f"runs/{name}:train:0/state-1", b"state")
    (blobs.root.parent / "telemetry" / "2026-11-22").mkdir(parents=True, exist_ok=True)

    def write(session: Session) -> str:
        org = organisations.organisation_named(session, name)
        for email in emails:
            organisations.add_member(session, org.id, email, "owner")
        organisations.create_project(session, org.id, "secret plans")
        new_key(session, org.id, name="laptop of Ann")
        session.add(session_row(org.id, NOW, id=name, state="finished", ended_at=NOW))
        session.flush()
        session.add(run_row(org.id, NOW, id=f"{name}:train:0", session_id=name, state="closed"))
        session.flush()
        kept = {"size_bytes": 10**12, "public": False, "user_metadata": {}, "created_at": NOW}
        row = Checkpoint(
            id=name, org_id=org.id, run_id=f"{name}:train:0", kind="weights", name="one", ref=weights, **kept
        )
        session.add(row)
        session.flush()
        begin(session, row, NOW - timedelta(hours=3))
        op = {"session_id": name, "lane": f"{name}:train:0", "seq": 1, "kind": "forward_backward", "base_model": "m"}
        op |= {"state": "done", "tokens": 9, "plan": {}, "body_sha256": "", "result_bytes": 9, "accepted_at": NOW}
        refs = {"body_ref": f"ops/00/{name}", "result_ref": f"results/00/{name}"}
        session.add(Operation(id=name, org_id=org.id, **op, **refs))
        small = op | {"seq": 2, "kind": "optim_step", "body_ref": "", "body": "{}", "result": f"step of {name}"}
        session.add(Operation(id=f"{name}-2", org_id=org.id, **small))
        session.flush()
        charge = Charge(
            Payer(org.id, "default", None), name, f"{name}:train:0", name, "weft/tiny-moe", NOW, {"train": 1000}, 0
        )
        settle(session, [charge], load_prices([]), NOW)
        (blobs.root.parent / "telemetry" / "2026-11-22" / f"{org.id}.jsonl").write_text("{}\n")
        return str(org.id)

    return database.write_now(write)


@pytest.fixture
def two(database: Database, blobs: Blobs) -> tuple[str, str]:
    """acme, which is about to be deleted, and globex, which has a copy of acme's weights and a member in common."""
    acme = work(database, blobs, "acme", "weights/acme", "ann@x.org", "bob@x.org")
    globex = work(database, blobs, "globex", "weights/globex", "bob@x.org")
    return acme, globex


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_an_export_that_fails_leaves_nothing_that_looks_like_one(two: tuple[str, str], tmp_path: Path) -> None:
    """Half of an export would be taken for all of it, and the next try would be refused because of it."""
    log = tmp_path / "telemetry" / "2026-11-22" / f"{two[0]}.jsonl"
    said = log.read_text()
    log.unlink()
    log.mkdir()  # unreadable, as on a disk that fails
    made = run(tmp_path, "export", "acme", tmp_path / "out" / "acme")
    assert (made.exit_code, len(made.stderr.splitlines())) == (2, 1), made.exception
    assert list((tmp_path / "out").iterdir()) == []
    log.rmdir()
    log.write_text(said)
    assert run(tmp_path, "export", "acme", tmp_path / "out" / "acme").exit_code == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["acme"]
    made = run(tmp_path, "export", "acme", log / "out")
    assert (made.exit_code, len(made.stderr.splitlines())) == (2, 1), made.exception


def test_an_export_holds_all_that_is_owned_and_no_secret(
    two: tuple[str, str], database: Database, tmp_path: Path
) -> None:
    made = run(tmp_path, "export", "acme", tmp_path / "out")
    assert made.exit_code == 0, made.stderr
    out = tmp_path / "out"
    assert subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=out).returncode == 0
    assert (out / "checkpoints/acme:train:0/weights/one/adapter.bin").read_bytes() == b"of acme"
    assert (
        (out / "operations/acme.body").read_bytes()
        == (out / "operations/acme.result").read_bytes()
        == b"tokens of acme"
    )
    assert (out / "operations/acme-2.body").read_text() == "{}"
    assert (out / "operations/acme-2.result").read_text() == "step of acme"
    assert (out / "telemetry/2026-11-22.jsonl").is_file()
    said = "".join((out / name).read_text() for name in names(out) if name.startswith("tables/"))
    assert "ann@x.org" in said
    assert two[1] not in said
    assert "globex" not in said
    with database.read() as session:
        for secret in session.scalars(select(tables.ApiKey.secret_sha256)):
            assert secret not in said
    rows = {path.stem: path.read_text().splitlines() for path in (out / "tables").iterdir()}
    assert json.loads(rows["usage_events"][0])["amount_nusd"] > 0
    assert {len(rows[table]) for table in ("runs", "checkpoints", "organisations")} == {1}
    assert len(rows["operations"]) == 2
    assert len(rows["users"]) == 2


def test_a_deletion_leaves_the_books_the_trail_and_the_neighbours(
    two: tuple[str, str], database: Database, blobs: Blobs, tmp_path: Path
) -> None:
    acme, globex = two

    def copied(session: Session) -> None:  # like a copy of a published checkpoint
        row = session.get(Checkpoint, "globex")
        row.ref = "weights/acme"

    database.write_now(copied)
    assert "only closed ones are deleted" in run(tmp_path, "delete", "acme", "--confirm", "acme").stderr
    run(tmp_path, "status", "acme", "closed")
    assert "must be the name again" in run(tmp_path, "delete", "acme", "--confirm", "globex").stderr
    with database.read() as session:
        ledger = select(LedgerEntry.org_id, LedgerEntry.amount_nusd).order_by(LedgerEntry.id)
        before = session.execute(ledger).all()
    gone = run(tmp_path, "delete", "acme", "--confirm", "acme")
    assert gone.exit_code == 0, gone.stderr
    with database.read() as session:
        for table in DELETED:
            of = select(func.count()).select_from(table).where(table.__table__.c.org_id == acme)
            assert session.scalar(of) == 0, table
        assert session.execute(ledger).all() == before
        assert session.scalars(select(User.email)).all() == ["bob@x.org"]
        assert session.get_one(Organisation, acme).name == f"deleted-{acme}"
        assert session.scalars(select(tables.ApiKey.name).filter_by(org_id=acme)).all() == [""]
        verdict = audit.verify(session, acme)
        assert not verdict.problems
        events = session.scalars(select(tables.AuditEntry.event).filter_by(org_id=acme)).all()
        assert events[-1] == "organization_data_deleted"
        assert "member_added" in events
    left = names(tmp_path / "blobs") | names(tmp_path / "telemetry")
    assert not any("acme" in name for name in left if not name.startswith("weights/acme/"))  # which globex has
    assert f"2026-11-22/{globex}.jsonl" in left
    assert f"2026-11-22/{acme}.jsonl" not in left
    assert {"weights/acme/adapter.bin", "ops/00/globex", "results/00/globex", "runs/globex:train:0/state-1"} <= left
    meter(database, load_prices([]), datetime.now(UTC))  # the storage of its last hours
    with database.read() as session:
        stored = select(func.sum(UsageEvent.amount_nusd)).filter_by(org_id=acme, kind="storage")
        assert (session.scalar(stored) or 0) > 0
        assert session.scalar(select(func.count()).select_from(tables.StorageSpan).filter_by(org_id=acme)) == 0
    books = CliRunner().invoke(weftd, ["billing", "reconcile", "--data-dir", str(tmp_path)])
    assert books.stdout == "the books agree\n"


def test_an_organisation_still_at_work_is_not_deleted(two: tuple[str, str], database: Database, tmp_path: Path) -> None:
    def revive(session: Session) -> None:
        session.get(tables.Session, "acme").state = "active"

    database.write_now(revive)
    run(tmp_path, "status", "acme", "closed")
    refused = run(tmp_path, "delete", "acme", "--confirm", "acme")
    assert (refused.exit_code, refused.stderr.count("1 sessions are active")) == (2, 1)
    with database.read() as session:
        assert session.get(Checkpoint, "acme") is not None


def test_every_table_of_an_organisation_is_deleted_or_kept_on_purpose() -> None:
    owned = {table.name for table in Base.metadata.sorted_tables if "org_id" in table.c}
    said = [table.__tablename__ for table in (*DELETED, *KEPT)]
    assert sorted(said) == sorted(owned)
