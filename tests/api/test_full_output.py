"""What `weftd` cannot print has not happened: nobody knows of it, and the operator types it again."""

from __future__ import annotations

import errno
from pathlib import Path

import click
import pytest
from sqlalchemy import func, select

from api.cli import weftd
from store import tables
from store.database.db import Database
from store.people.organisations import add_member, organisation_named
from tests.keys import create_key
from tests.migrated import database_in

CHANGED = (tables.ApiKey, tables.LoginLink, tables.LedgerEntry, tables.AuditEntry)


def state(database: Database) -> list[object]:
    with database.read() as session:
        rows = [session.scalar(select(func.count()).select_from(table)) for table in CHANGED]
        return [*rows, *session.scalars(select(tables.ApiKey.secret_sha256))]


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_cannot_be_printed_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = database_in(tmp_path)
    key = database.write_now(lambda session: create_key(session, "acme"))
    org_id = database.write_now(lambda session: organisation_named(session, "acme").id)
    database.write_now(lambda session: add_member(session, org_id, "ada@acme.example", "owner"))
    before = state(database)
    monkeypatch.setattr(click, "echo", full)
    for command in (
        ("key", "create", "--org", "acme"),
        ("key", "rotate", key[:12]),
        ("user", "login-link", "--org", "acme", "--email", "ada@acme.example"),
        ("credit", "grant", "--org", "acme", "--usd", "1"),
    ):
        with pytest.raises(OSError, match="No space left"):
            weftd.main([*command, "--data-dir", str(tmp_path)], standalone_mode=False)
    after = state(database)
    database.close()
    assert after == before
