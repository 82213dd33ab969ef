"""Which keys and memberships somebody sees, may change, and gets the secret of. The attacks over HTTP are
tests/tenancy/test_credentials.py."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from api.errors import Forbidden, NotFound
from api.who.credentials import changed_key, changed_member, key_reach, managed_key, permit_secret
from api.who.principal import Principal
from api.who.reach import Reach
from store import tables
from store.database.db import Database
from store.people.keys import new_key
from store.people.organisations import NoSuch
from store.people.roles import ADMIN

NOW = datetime.now(UTC)
OWNER = Principal("acme", 1)
MEMBER = frozenset({"train", "sample"})


@pytest.fixture
def keys(filled: Database) -> Database:
    """1: acme's; 2: ann's, a member; 3: bob's, an owner; 4: ann's in the project p; 5: rival's; 6: ann's at rival;
    7: acme's in the project p; 8: of somebody who has left acme."""

    def write(session: Any) -> None:
        session.add(tables.User(id="gone", email="gone@example.com", created_at=NOW))
        for org_id, name, role in (("acme", "ann", "member"), ("acme", "bob", "owner"), ("rival", "ann", "owner")):
            session.add(tables.Membership(org_id=org_id, user_id=name, role=role, created_at=NOW))
        session.flush()
        owners: tuple[tuple[str, str | None, str | None], ...] = (
            ("acme", None, None),
            ("acme", "ann", None),
            ("acme", "bob", None),
            ("acme", "ann", "p"),
            ("rival", None, None),
            ("rival", "ann", None),
            ("acme", None, "p"),
            ("acme", "gone", None),
        )
        for org_id, user_id, project_id in owners:
            new_key(session, org_id, user_id=user_id, project_id=project_id)

    filled.write_now(write)
    return filled


#: Everybody, and the keys that they see.
SEEN = [
    (OWNER, {1, 2, 3, 4, 7, 8}),
    (Principal("acme", 3, "bob", role="admin"), {1, 2, 3, 4, 7, 8}),
    (Principal("acme", 2, "ann", role="member", scopes=MEMBER), {2, 4}),
    (Principal("acme", None, "ann", role="member", scopes=MEMBER), {2, 4}),
    (Principal("acme", 4, "ann", "p", role="member", scopes=MEMBER), {4}),
    (Principal("acme", 4, "ann", "q", role="member", scopes=MEMBER), set()),
    (Principal("acme", 7, None, "p", scopes=MEMBER), set()),
    (Principal("acme", 7, None, "p", scopes=frozenset({ADMIN})), {4, 7}),
    (Principal("acme", 1, None, scopes=MEMBER), set()),
    (Principal("rival", 5), {5, 6}),
]


@pytest.mark.parametrize(("who", "seen"), SEEN)
def test_which_keys_somebody_sees(keys: Database, who: Principal, seen: set[int]) -> None:
    with keys.read() as session:
        for id in range(10):
            if id in seen:
                assert managed_key(session, who, str(id)).id == id
            else:
                with pytest.raises(NotFound, match=f"no key '{id}'"):
                    managed_key(session, who, str(id))


@pytest.mark.parametrize("key_id", ["", "x", "-1", "\u00b2", "\u0661", "1 ", "1" * 18, "1" * 19, "9" * 400])
def test_what_is_no_key_is_not_found(keys: Database, key_id: str) -> None:
    """Numbers beyond what a database holds, and digits of other alphabets."""
    with keys.read() as session, pytest.raises(NotFound):
        managed_key(session, OWNER, key_id)


def test_leading_zeros_name_the_same_key(keys: Database) -> None:
    with keys.read() as session:
        assert managed_key(session, OWNER, "1".rjust(18, "0")).id == 1
        with pytest.raises(NotFound):
            managed_key(session, OWNER, "1".rjust(19, "0"))


@pytest.mark.parametrize(
    ("key_id", "role", "project"),
    [(1, "owner", None), (2, "member", None), (3, "owner", None), (4, "member", "p"), (7, "owner", "p")],
)
def test_how_far_a_key_goes(keys: Database, key_id: int, role: str, project: str | None) -> None:
    end = NOW + timedelta(days=1)

    def write(session: Any) -> Reach:
        row = session.get_one(tables.ApiKey, key_id)
        row.expires_at = end
        return key_reach(session, row)

    assert keys.write_now(write) == Reach.of([ADMIN], role, project, end)


def test_the_key_of_one_who_has_left_goes_as_far_as_a_viewers(keys: Database) -> None:
    with keys.read() as session:
        assert key_reach(session, session.get_one(tables.ApiKey, 8)).role == "viewer"


def test_a_key_is_changed_only_by_credentials_that_go_as_far(keys: Database) -> None:
    admin = Principal("acme", None, "bob", role="admin")
    with keys.read() as session:
        assert changed_key(session, OWNER, "3", "revoke").id == 3
        assert changed_key(session, admin, "2", "revoke").id == 2
        with pytest.raises(Forbidden, match=r"you cannot revoke key 3, .*role: "):
            changed_key(session, admin, "3", "revoke")
        with pytest.raises(NotFound):
            changed_key(session, OWNER, "5", "revoke")


#: Who may get the secret of a key like an admin's, of that user.
SECRETS = [
    (OWNER, None, True),
    (OWNER, "ann", True),
    (Principal("acme", None, "ann", role="member"), "-ann"[1:], True),
    (Principal("acme", None, "ann", role="member"), "bob", False),
    (Principal("acme", None, "bob", role="member"), "ann", False),
    (Principal("acme", None, "ann", role="member"), None, False),
    (Principal("acme", None, "ann", role="owner"), "bob", True),
    (Principal("acme", 7, None, role="member"), None, False),
]


@pytest.mark.parametrize(("who", "user_id", "may"), SECRETS)
def test_who_may_be_given_a_secret(who: Principal, user_id: str | None, may: bool) -> None:
    """The key of another user counts as an owner's, because that is what it will be if they become one."""
    key = Reach.of([ADMIN], "viewer")
    if may:
        permit_secret(who, key, user_id, "do it")
    else:
        with pytest.raises(Forbidden, match=r"you cannot do it, .*role: "):
            permit_secret(who, key, user_id, "do it")


def test_a_secret_beyond_ones_project_or_end_is_given_to_nobody() -> None:
    end = NOW + timedelta(hours=1)
    for who in (Principal("acme", 7, None, "p"), Principal("acme", 1, until=end)):
        with pytest.raises(Forbidden):
            permit_secret(who, Reach.of(["train"], "owner"), None, "do it")
    permit_secret(Principal("acme", 7, None, "p", until=end), Reach.of(["train"], "owner", "p", end), None, "do it")


def test_a_membership_is_changed_only_by_credentials_that_go_as_far(keys: Database) -> None:
    admin = Principal("acme", None, "bob", role="admin")
    with keys.read() as session:
        assert changed_member(session, OWNER, "bob", "end").role == "owner"
        assert changed_member(session, admin, "ann", "end").role == "member"
        with pytest.raises(Forbidden, match="you cannot end, "):
            changed_member(session, admin, "bob", "end")
        with pytest.raises(NoSuch):
            changed_member(session, OWNER, "nobody", "end")
        with pytest.raises(NoSuch):
            changed_member(session, Principal("rival", 5), "bob", "end")
