"""Keys: shown once, kept as a hash, and good for exactly one organisation until revoked."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from store.database import audit
from store.database.caller import OPERATOR, Caller, acting_as
from store.database.db import Database
from store.people import keys
from store.people.secret import digest
from store.tables import ApiKey
from tests.keys import create_key

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
TICK = timedelta(microseconds=1)


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
def test_any_other_secret_is_of_nobody(database: Database, spoil: object) -> None:
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


def test_a_secret_that_is_not_the_keys_revokes_nothing_and_the_next_of_that_prefix_is_tried(database: Database) -> None:
    """Prefixes are random and not unique: a whole key revokes itself alone, whichever others begin like it."""
    first, second, other = (create(database, "a") for _ in range(3))

    def alike(session: Any) -> None:
        one, two = session.get_one(ApiKey, 1), session.get_one(ApiKey, 2)
        two.prefix = one.prefix
        two.secret_sha256 = digest(one.prefix + second[12:])

    database.write_now(alike)
    assert database.write_now(lambda session: keys.revoke(session, first[:12] + second[12:])) == 1
    assert authenticate(database, first) is not None
    assert authenticate(database, other) is not None
    assert authenticate(database, first[:12] + second[12:]) is None
    assert database.write_now(lambda session: keys.revoke(session, other[:11])) == 0


@pytest.mark.parametrize("of", [lambda whole: min(whole), lambda whole: max(whole)])
def test_a_prefix_revokes_its_own_key_only(database: Database, of: Callable[[list[str]], str]) -> None:
    """And no key whose prefix sorts before or after it."""
    whole = [create(database, "a") for _ in range(3)]
    chosen = of(whole)
    assert database.write_now(lambda session: keys.revoke(session, chosen[:12])) == 1
    assert [authenticate(database, key) is None for key in whole] == [key == chosen for key in whole]


def test_many_secrets_of_many_keys_are_each_their_own_keys(database: Database) -> None:
    """Also while the earlier secrets are still valid, in whatever order their hashes sort."""
    old = [create(database, f"{n}") for n in range(6)]

    def rotate(session: Any) -> list[str]:
        return [keys.rotate(session, session.get_one(ApiKey, n + 1), timedelta(hours=1)) for n in range(6)]

    new = database.write_now(rotate)
    with database.read() as session:
        for secrets in (old, new):
            found = [keys.find(session, secret) for secret in secrets]
            assert [row.id if row is not None else None for row in found] == [1, 2, 3, 4, 5, 6]


def test_a_secret_that_was_rotated_away_revokes_its_key(database: Database) -> None:
    secret = create(database, "a")
    database.write_now(lambda session: keys.rotate(session, session.get_one(ApiKey, 1), timedelta(0)))
    assert database.write_now(lambda session: keys.revoke(session, secret)) == 1


def test_another_secret_is_as_long_and_ends_as_its_row_says(database: Database) -> None:
    secret = create(database, "a")
    other = database.write_now(lambda session: keys.rotate(session, session.get_one(ApiKey, 1), timedelta(hours=1)))
    assert re.fullmatch(r"tml-[A-Za-z0-9]{8}_[A-Za-z0-9]{43}", other)
    assert (other[:12], other != secret) == (secret[:12], True)
    with database.read() as session:
        assert session.get_one(ApiKey, 1).last4 == other[-4:]
    third = create(database, "a")
    with database.read() as session:
        assert session.get_one(ApiKey, 2).last4 == third[-4:]


def test_a_key_and_its_earlier_secret_end_at_their_moment(database: Database) -> None:
    """At that moment itself neither is valid any more."""
    old = create(database, "a")
    new = database.write_now(lambda session: keys.rotate(session, session.get_one(ApiKey, 1), timedelta(hours=1)))

    def until(overlap: datetime | None, end: datetime | None) -> Callable[[Any], None]:
        def write(session: Any) -> None:
            row = session.get_one(ApiKey, 1)
            row.previous_expires_at, row.expires_at = overlap, end

        return write

    def found(secret: str) -> list[bool]:
        with database.read() as session:
            return [keys.find(session, secret, NOW + after) is not None for after in (-TICK, TICK * 0, TICK)]

    database.write_now(until(NOW, None))
    assert (found(old), found(new)) == ([True, False, False], [True] * 3)
    database.write_now(until(NOW + timedelta(days=1), NOW))
    assert (found(old), found(new)) == ([True, False, False], [True, False, False])
    database.write_now(until(None, None))
    assert (found(old), found(new)) == ([False] * 3, [True] * 3)


@pytest.mark.parametrize(
    ("overlap", "end", "of_old", "of_new"),
    [
        (NOW, None, NOW, None),
        (NOW, NOW + TICK, NOW, NOW + TICK),
        (NOW + TICK, NOW, NOW, NOW),
        (None, NOW, NOW, NOW),
        (None, None, None, None),
    ],
)
def test_when_a_secret_ends(
    overlap: datetime | None, end: datetime | None, of_old: datetime | None, of_new: datetime | None
) -> None:
    row = ApiKey(
        secret_sha256=digest("new"),
        previous_sha256=digest("old"),
        previous_expires_at=overlap,
        expires_at=end,
    )
    assert (keys.secret_ends(row, "old"), keys.secret_ends(row, "new")) == (of_old, of_new)


@pytest.mark.parametrize(
    ("who", "receiver"),
    [
        (Caller("a", "user:ann"), "user:ann"),
        (Caller("a", "key:7"), "key:7"),
        (Caller("a", "user:ann", link_by="user:boss"), "user:boss"),
        (Caller("a", "user:ann", link_by="operator"), None),
        (OPERATOR, None),
        (Caller(None, "server"), None),
    ],
)
def test_a_row_says_who_was_given_its_secret(database: Database, who: Caller, receiver: str | None) -> None:
    """Whoever made the link by which a session began may be the one who uses it: then the row names them."""
    create(database, "a")

    def given(session: Any) -> list[str | None]:
        row = session.get_one(ApiKey, 1)
        keys.rotate(session, row, timedelta(0))
        return [row.given_to, keys.new_key(session, row.org_id)[0].given_to]

    with acting_as(who):
        assert database.write_now(given) == [receiver, receiver]


def test_what_was_done_to_a_key_is_logged_under_the_key_that_did_it(database: Database) -> None:
    create(database, "a")

    def write(session: Any) -> list[tuple[Any, ...]]:
        before = len(audit.pending(session))
        row, _ = keys.new_key(session, session.get_one(ApiKey, 1).org_id, scopes=["train", "sample"], by=1)
        keys.rotate(session, row, timedelta(seconds=90), by=1)
        keys.revoke_row(session, row, by=1)
        noted = audit.pending(session)[before:]
        return [(entry["event"], entry["key_id"], entry["target"] == row.prefix, entry["detail"]) for entry in noted]

    assert database.write_now(write) == [
        (
            "key_created",
            1,
            True,
            {"key_id": 2, "scopes": ["sample", "train"], "user_id": None, "project_id": None},
        ),
        ("key_rotated", 1, True, {"key_id": 2, "overlap_s": 90}),
        ("key_revoked", 1, True, {"key_id": 2}),
    ]


def test_keys_are_listed_with_their_own_organisation(database: Database) -> None:
    for name in ("b", "a", "b"):
        create(database, name)
    with database.read() as session:
        assert [(org.name, key.id) for org, key in keys.list_keys(session)] == [("b", 1), ("a", 2), ("b", 3)]
