"""Whom a key stands for, what counts as its own, and the name under which it acts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select

from api.who.principal import Principal, RateLimit, principal_of
from store import tables
from store.database.db import Database
from store.people.keys import new_key
from store.people.roles import BEYOND_A_PROJECT, SCOPES

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
SOON, LATER = NOW + timedelta(minutes=15), NOW + timedelta(days=1)


def of_key(database: Database, until: datetime | None = None, **options: Any) -> Principal | None:
    def write(session: Any) -> Principal | None:
        session.add(tables.Membership(org_id="acme", user_id="ann", role="member", created_at=NOW))
        session.flush()
        return principal_of(session, new_key(session, "acme", **options)[0], until)

    return database.write_now(write)


def test_no_key_is_nobody_and_so_is_one_whose_user_has_left(filled: Database) -> None:
    with filled.read() as session:
        assert principal_of(session, None) is None
    assert of_key(filled, user_id="bob") is None


def test_a_key_of_the_organisation_is_an_owners(filled: Database) -> None:
    who = of_key(filled, scopes=["train"])
    assert who is not None
    assert (who.org_id, who.key_id, who.user_id, who.project_id, who.role) == ("acme", 1, None, None, "owner")
    assert (set(who.scopes), set(who.given), who.status, who.until) == ({"train"}, {"train"}, "active", None)
    assert (who.urn, who.actor, who.domain, who.in_person) == ("weft:key:1", "key:1", "acme", True)


def test_a_key_of_a_user_has_what_their_role_leaves_of_it(filled: Database) -> None:
    who = of_key(filled, user_id="ann")
    assert who is not None
    assert (who.role, set(who.given), who.user_id) == ("member", {"admin"}, "ann")
    assert who.scopes == {"train", "sample", "checkpoints:read", "checkpoints:write"}
    assert (who.urn, who.actor) == ("weft:key:1", "user:ann")
    assert who.reach.role == "member"


@pytest.mark.parametrize(("project", "scopes"), [("p", SCOPES - BEYOND_A_PROJECT), (None, SCOPES)])
def test_a_key_of_a_project_has_nothing_beyond_it(
    filled: Database, project: str | None, scopes: frozenset[str]
) -> None:
    who = of_key(filled, project_id=project)
    assert who is not None
    assert (who.project_id, who.scopes) == (project, scopes)
    assert who.domain == ("acme p" if project else "acme")
    assert who.reach.project_id == project


def test_a_project_adds_nothing_to_a_key_of_few_scopes(filled: Database) -> None:
    who = of_key(filled, project_id="p", scopes=["train", "billing:read"])
    assert who is not None
    assert set(who.scopes) == {"train"}


@pytest.mark.parametrize(
    ("end", "until", "ends"),
    [(None, None, None), (SOON, None, SOON), (None, SOON, SOON), (LATER, SOON, SOON), (SOON, LATER, SOON)],
)
def test_it_ends_with_its_key_and_with_what_stands_for_it(
    filled: Database, end: datetime | None, until: datetime | None, ends: datetime | None
) -> None:
    who = of_key(filled, until, expires_at=end)
    assert who is not None
    assert (who.until, who.reach.until) == (ends, ends)


@pytest.mark.parametrize(
    ("given_to", "in_person", "actor"),
    [(None, True, "user:ann"), ("user:ann", True, "user:ann"), ("user:bob", False, "key:1"), ("key:1", False, "key:1")],
)
def test_it_acts_under_its_users_name_if_nobody_else_has_its_secret(
    filled: Database, given_to: str | None, in_person: bool, actor: str
) -> None:
    def write(session: Any) -> Principal | None:
        session.add(tables.Membership(org_id="acme", user_id="ann", role="owner", created_at=NOW))
        session.flush()
        row, _ = new_key(session, "acme", user_id="ann")
        row.given_to = given_to
        return principal_of(session, row)

    who = filled.write_now(write)
    assert who is not None
    assert (who.in_person, who.actor) == (in_person, actor)


def test_limits_are_of_the_organisation_the_project_and_the_key(filled: Database) -> None:
    def write(session: Any) -> list[tuple[RateLimit, ...]]:
        org, project = session.get_one(tables.Organisation, "acme"), session.get_one(tables.Project, ("acme", "p"))
        org.requests_per_minute, project.tokens_per_minute = 10, 20
        found = []
        for project_id in ("p", None):
            row, _ = new_key(session, "acme", project_id=project_id)
            row.max_in_flight = 3
            who = principal_of(session, row)
            assert who is not None
            found.append(who.limits)
        return found

    assert filled.write_now(write) == [
        (
            RateLimit("organisation", "acme", 10, None, None),
            RateLimit("project", "acme p", None, 20, None),
            RateLimit("key", "1", None, None, 3),
        ),
        (RateLimit("organisation", "acme", 10, None, None), RateLimit("key", "2", None, None, 3)),
    ]


def test_limits_do_not_make_another_of_somebody() -> None:
    """Sessions and caches are found by the caller, whatever the limits."""
    limit = RateLimit("key", "1", 1, None, None)
    assert Principal("acme", 1, limits=(limit,)) == Principal("acme", 1)
    assert Principal("acme", 1) != Principal("acme", 2)
    assert hash(Principal("acme", 1, limits=(limit,))) == hash(Principal("acme", 1))
    with pytest.raises(AttributeError):
        Principal("acme", 1).role = "viewer"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        limit.scope = "project"  # type: ignore[misc]


def test_a_person_at_the_console_has_no_key() -> None:
    who = Principal("acme", None, "ann")
    assert (who.urn, who.actor, who.in_person, who.role) == ("weft:user:ann", "user:ann", True, "owner")


#: Callers, and the sessions of acme that are their own.
OWN = [
    (Principal("acme", 1, "ann"), ["ann-p", "ann-q"]),
    (Principal("acme", 2, "ann"), ["ann-p", "ann-q", "bob-p"]),  # what was made with their key is theirs
    (Principal("acme", 2, "bob"), ["bob-p"]),
    (Principal("acme", 8, "bob"), ["bob-p"]),
    (Principal("acme", None, "ann"), ["ann-p", "ann-q"]),
    (Principal("acme", 3), ["key-none"]),
    (Principal("acme", 1), ["ann-p", "ann-q"]),
    (Principal("acme", 8), []),
    (Principal("acme", None), []),
]


@pytest.mark.parametrize(("who", "own"), OWN)
def test_own_is_what_was_made_with_the_key_or_by_the_user(filled: Database, who: Principal, own: list[str]) -> None:
    with filled.read() as session:
        here = session.scalars(select(tables.Session).filter_by(org_id="acme").order_by(tables.Session.id)).all()
        assert [row.id for row in here if who.owns(row)] == own
        for row in here:
            operation = session.get_one(tables.Operation, f"{row.id}:op")
            assert who.owns(operation) == (row.id in own)
        made = session.scalars(select(tables.Session.id).filter_by(org_id="acme").where(who.made()))
        assert sorted(made) == own


def test_what_nobody_made_is_not_nobodys_own() -> None:
    row = tables.Session(id="s", key_id=None, user_id=None)
    assert not Principal("acme", None).owns(row)
    assert not Principal("acme", None, "ann").owns(row)


def test_large_numbers_of_keys_are_compared_by_value() -> None:
    row = tables.Session(id="s", key_id=int("123456789"), user_id=None)
    assert Principal("acme", 123456789).owns(row)
