"""Keys: shown once, kept as a hash, and good for exactly one organisation until revoked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from store import keys
from store.db import Database
from tests.keys import create_key


def create(database: Database, org_name: str) -> str:
    return database.write_now(lambda session: create_key(session, org_name))


def authenticate(database: Database, secret: str) -> str | None:
    with database.read() as session:
        row = keys.find(session, secret)
    return row.org_id if row is not None else None


def test_a_key_belongs_to_its_organisation(database: Database) -> None:
    first, second, other = create(database, "a"), create(database, "a"), create(database, "b")
    assert re.fullmatch(r"tml-[A-Za-z0-9]{8}_[A-Za-z0-9]{43}", first)
    assert authenticate(database, first) == authenticate(database, second) is not None
    assert authenticate(database, other) not in (None, authenticate(database, first))


@pytest.mark.parametrize(
    "spoil", [lambda k: k[:-1], lambda k: k + "x", lambda k: "", lambda k: k[:12], lambda k: "tml-é"]
)
def test_anything_else_is_nobody(database: Database, spoil: object) -> None:
    assert callable(spoil)
    assert authenticate(database, spoil(create(database, "a"))) is None


def test_a_revoked_key_is_nobody(database: Database) -> None:
    secret, kept = create(database, "a"), create(database, "a")
    assert database.write_now(lambda session: keys.revoke(session, secret[:12])) == 1
    assert database.write_now(lambda session: keys.revoke(session, secret[:12])) == 0
    assert authenticate(database, secret) is None
    assert authenticate(database, kept) is not None
    assert database.write_now(lambda session: keys.revoke(session, kept[:-1] + "!")) == 0
    assert database.write_now(lambda session: keys.revoke(session, kept)) == 1


def test_the_list_shows_prefixes_only(database: Database) -> None:
    secret = create(database, "a")
    with database.read() as session:
        [(org, key)] = keys.list_keys(session)
    assert (org.name, key.prefix, key.revoked_at) == ("a", secret[:12], None)


def test_the_secret_is_nowhere_on_disk(database: Database, tmp_path: Path) -> None:
    secret = create(database, "a")
    database.close()
    for file in tmp_path.rglob("*"):
        if file.is_file():
            assert secret.encode() not in file.read_bytes()
            assert secret[13:].encode() not in file.read_bytes()
