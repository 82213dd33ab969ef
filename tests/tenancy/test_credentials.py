"""A thief with a limited credential cannot make or change one that may more (`api.who.reach`).

Each test is an attacker's requests; the table of the rule itself is tests/api/test_reach.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from sqlalchemy.orm import Session

from api.http import bodies
from store.people import organisations
from store.people.keys import find, new_key, revoke_row, rotate
from store.tables import ApiKey, AuditEntry
from tests.api.conftest import World
from tests.tenancy.conftest import member, org_id_of

HOUR = timedelta(hours=1)
JSON = {"content-type": "application/json"}


def iso(after: timedelta) -> str:
    return (datetime.now(UTC) + after).isoformat()


def token(world: World, key: str | None = None) -> str:
    return str(world.post("auth/token", key=key)["jwt"])


def ending(world: World, after: timedelta = HOUR, **options: Any) -> str:
    """A key of the organisation that expires."""
    org_id, until = org_id_of(world), datetime.now(UTC) + after
    return world.database.write_now(lambda session: new_key(session, org_id, expires_at=until, **options)[1])


def rows(world: World) -> list[tuple[Any, ...]]:
    """All columns of keys that a thief may have changed."""
    with world.database.read() as session:
        keys = session.query(ApiKey).order_by(ApiKey.id)
        return [(row.secret_sha256, row.revoked_at, row.expires_at, row.max_in_flight) for row in keys]


class Thief:
    """Tries every request about keys and members with one credential; each must fail and change nothing."""

    def __init__(self, world: World, credential: str) -> None:
        self.world, self.credential = world, credential

    def fails(self, method: str, path: str, body: Any = None, because: str = "expiry: it has no end") -> None:
        before = rows(self.world)
        reply = self.world.call(method, path, key=self.credential, json=body)
        assert (reply.status_code, reply.json()["code"]) == (403, "forbidden"), reply.text
        assert because in reply.json()["detail"]
        assert rows(self.world) == before

    def takes_what_lasts(self) -> None:
        self.fails("POST", "weft/keys", {})
        self.fails("POST", "weft/keys", {"scopes": ["sample"], "expires_at": iso(9 * HOUR)}, "expiry: it ends ")
        self.fails("POST", "weft/keys/1/rotate", {"overlap_seconds": 0})
        self.fails("DELETE", "weft/keys/1")
        self.fails("PUT", "weft/rate_limits/key/1", {"max_in_flight": 1})
        self.fails("POST", "weft/members", {"email": "thief@example.com", "role": "owner"})


@pytest.mark.parametrize("kind", ["token", "key"])
def test_an_expiring_credential_makes_and_touches_nothing_that_lasts(any_world: World, kind: str) -> None:
    """With a stolen token or an expiring key: no permanent key, no rotation of the owner's, no lasting role."""
    world = any_world
    user_id, _ = member(world, "viewer")
    thief = Thief(world, token(world) if kind == "token" else ending(world))
    thief.takes_what_lasts()
    thief.fails("PUT", f"weft/members/{user_id}", {"role": "owner"})
    thief.fails("DELETE", f"weft/members/{user_id}")
    world.get("sessions")


def test_an_expiring_credential_makes_keys_that_expire_with_it(any_world: World) -> None:
    until = iso(timedelta(minutes=10))
    made = any_world.post("weft/keys", {"scopes": ["sample"], "expires_at": until}, key=ending(any_world))
    assert datetime.fromisoformat(made["expires_at"]) == datetime.fromisoformat(until)
    short = any_world.post("weft/keys", {"expires_at": iso(timedelta(minutes=10))}, key=token(any_world))
    any_world.post(f"weft/keys/{short['id']}/rotate", {}, key=short["key"])
    assert any_world.call("DELETE", f"weft/keys/{short['id']}", key=token(any_world)).is_success


def test_a_secret_that_was_rotated_away_is_no_way_back(any_world: World) -> None:
    """The old secret lives on for programs that still have it; a thief who has it keeps nothing beyond that time."""
    world, old = any_world, any_world.key
    new = world.post("weft/keys/1/rotate", {"overlap_seconds": 600})["key"]
    world.get("sessions", key=old)
    thief = Thief(world, old)
    thief.takes_what_lasts()
    thief.fails("DELETE", "auth/apikey/me")
    claims = world.service.tokens.read(token(world, old))
    assert claims.expires_at is not None
    assert claims.expires_at <= datetime.now(UTC) + timedelta(seconds=600)
    Thief(world, token(world, old)).takes_what_lasts()
    world.post("weft/keys/1/rotate", {"overlap_seconds": 0}, key=new)


@pytest.mark.parametrize("by", ["key", "token"])
def test_a_revoked_key_makes_no_other_in_the_seconds_after(any_world: World, by: str) -> None:
    """Keys are remembered for some seconds, but not by the requests that make keys."""
    world = any_world
    thief = world.post("weft/keys", {})
    credential = thief["key"] if by == "key" else token(world, thief["key"])
    world.get("sessions", key=credential)
    assert world.call("DELETE", f"weft/keys/{thief['id']}").is_success
    world.get("sessions", key=credential)
    before = rows(world)
    soon = iso(timedelta(minutes=5))
    for method, path, body in (
        ("POST", "weft/keys", {"expires_at": soon}),
        ("POST", "weft/keys/1/rotate", {}),
        ("POST", "weft/members", {"email": "thief@example.com", "role": "owner"}),
        ("POST", "auth/token", {}),
    ):
        assert world.call(method, path, key=credential, json=body).status_code == 401, path
    assert rows(world) == before


MAKES = [
    ("POST", "weft/keys", {"scopes": ["sample"]}),
    ("POST", "weft/keys/1/rotate", {}),
    ("POST", "weft/members", {"email": "thief@example.com", "role": "member"}),
    ("POST", "weft/invitations", {"email": "thief@example.com", "role": "member"}),
    ("PUT", "weft/rate_limits/key/1", {"max_in_flight": 1}),
]


def lost(session: Session, row: ApiKey, how: str) -> None:
    if how == "revoked":
        revoke_row(session, row)
    elif how == "rotated":
        rotate(session, row, timedelta(0))
    else:
        organisations.change_role(session, row.org_id, str(row.user_id), "viewer")


@pytest.mark.parametrize("how", ["revoked", "rotated", "demoted"])
def test_a_body_that_comes_after_its_key_was_lost_makes_nothing(any_world: World, how: str) -> None:
    """Otherwise whoever keeps a request open by not ending its body would be let in for as long as it is open."""
    world = any_world
    _, spare = member(world, "owner", "spare@corp.example")
    for number, (method, path, body) in enumerate(MAKES):
        _, secret = member(world, "owner", f"p{number}@corp.example")
        before = rows(world)

        def late(secret: str = secret, body: Any = body) -> Iterator[bytes]:
            world.database.write_now(lambda session: lost(session, found(session, secret), how))
            yield json.dumps(body).encode()

        reply = world.call(method, path, key=secret, content=late(), headers={"content-type": "application/json"})
        assert (reply.status_code, reply.json()["code"]) == (401, "unauthenticated"), reply.text
        assert rows(world)[: len(before) - 1] == before[:-1]
        assert len(rows(world)) == len(before)
        assert "thief@example.com" not in str(world.get("weft/members", key=spare))
    assert world.get("weft/invitations", key=spare)["invitations"] == []


@pytest.mark.parametrize("how", ["revoked", "rotated", "demoted"])
@pytest.mark.parametrize("path", ["forward_backward", "asample", "create_model", "weft/runs/no-run/metrics"])
def test_a_body_that_took_long_works_for_no_key_that_was_lost_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch, path: str, how: str
) -> None:
    monkeypatch.setattr(bodies, "REMEMBERED_S", 0.0)
    _, secret = member(world, "member", "p@corp.example")

    def late(loses: bool) -> Iterator[bytes]:
        if loses:
            world.database.write_now(lambda session: lost(session, found(session, secret), how))
            world.state.keys.clear()
        yield b"{}"

    def ask(loses: bool) -> int:
        status: int = world.call("POST", path, key=secret, content=late(loses), headers=JSON).status_code
        return status

    assert ask(loses=False) not in (401, 403)
    assert ask(loses=True) == (403 if how == "demoted" else 401)


def found(session: Session, secret: str) -> ApiKey:
    row = find(session, secret)
    assert row is not None
    return row


def test_few_scopes_touch_no_key_of_more(any_world: World) -> None:
    """A member's key that may only sample does not end the one that trains."""
    _, whole = member(any_world, "member")
    sampling = any_world.post("weft/keys", {"scopes": ["sample"]}, key=whole)
    whole_id = next(row["id"] for row in any_world.get("weft/keys", key=whole)["keys"] if row["scopes"] == ["admin"])
    thief = Thief(any_world, sampling["key"])
    for method, path in (("POST", f"weft/keys/{whole_id}/rotate"), ("DELETE", f"weft/keys/{whole_id}")):
        thief.fails(method, path, {} if method == "POST" else None, "scopes: admin, ")
    thief.fails("POST", "weft/keys", {"scopes": ["sample", "train"]}, "scopes: train, which yours does not have")
    any_world.post(f"weft/keys/{sampling['id']}/rotate", {}, key=sampling["key"])
    assert any_world.call("DELETE", f"weft/keys/{sampling['id']}", key=whole).is_success


def test_a_key_does_not_grow_by_a_role_to_come(any_world: World) -> None:
    """The scope `admin` adds nothing to a member's key today; the day they become owners it would."""
    user_id, whole = member(any_world, "member")
    today = any_world.post("weft/keys", {"scopes": ["train", "sample"]}, key=whole)["key"]
    Thief(any_world, today).fails("POST", "weft/keys", {"scopes": ["admin"]}, "scopes: admin, ")
    _, admin = member(any_world, "admin")
    for_them = {"user_id": user_id, "scopes": ["admin"]}
    Thief(any_world, admin).fails("POST", "weft/keys", for_them, "role: it has the scope admin of an owner")
    made = any_world.post("weft/keys", {**for_them, "scopes": ["train"]}, key=admin)
    assert made["user_id"] == user_id


def test_admins_touch_no_key_of_owners(any_world: World) -> None:
    owner_id, _ = member(any_world, "owner")
    _, admin = member(any_world, "admin")
    thief = Thief(any_world, admin)
    for key_id in (1, 3):  # the organisation's key, the owner's key
        for method, path, body in (
            ("POST", f"weft/keys/{key_id}/rotate", {}),
            ("DELETE", f"weft/keys/{key_id}", None),
            ("PUT", f"weft/rate_limits/key/{key_id}", {"max_in_flight": 1}),
        ):
            thief.fails(method, path, body, "has the scope admin of an owner")
    thief.fails("PUT", f"weft/members/{owner_id}", {"role": "viewer"}, "has the scope admin of an owner")
    thief.fails("POST", "weft/members", {"email": "x@example.com", "role": "owner"}, "has the scope admin of an owner")


def test_a_key_of_a_project_stays_in_it(any_world: World) -> None:
    project = any_world.post("weft/projects", {"name": "evals"})["id"]
    org_id = org_id_of(any_world)
    user_id, _ = member(any_world, "owner")

    def write(session: Any) -> str:
        return new_key(session, org_id, user_id=user_id, project_id=project)[1]

    bound = any_world.database.write_now(write)
    made = any_world.post("weft/keys", {"scopes": ["train"], "project_id": "elsewhere"}, key=bound)
    assert made["project_id"] == project
    any_world.get("weft/keys/1", key=bound, status=404)
    any_world.get("weft/keys/3", key=bound, status=404)  # also theirs, but for all projects


def test_members_email_addresses_are_shown_to_members_only(any_world: World) -> None:
    """A key that is bound to a project shows its own member's only; one without a user, or that only samples, none."""
    project = any_world.post("weft/projects", {"name": "evals"})["id"]
    _, whole = member(any_world, "member", "ann@example.com")
    member(any_world, "admin", "bob@example.com")
    bound = any_world.post("weft/keys", {"scopes": ["train"], "project_id": project}, key=whole)["key"]
    nobodys = any_world.post("weft/keys", {"scopes": ["train"], "project_id": project})["key"]
    sampling = any_world.post("weft/keys", {"scopes": ["sample"]})["key"]

    def seen(key: str | None) -> list[str]:
        return sorted(row["email"] for row in any_world.get("weft/members", key=key)["members"])

    both = ["ann@example.com", "bob@example.com"]
    assert (seen(None), seen(whole), seen(bound), seen(nobodys), seen(sampling)) == (both, both, both[:1], [], [])


def test_a_signed_link_ends_with_the_token_that_asked_for_it(any_world: World) -> None:
    def ends(key: str | None) -> datetime:
        url = any_world.get(f"sessions/{session_id}/trace_export", key=key)["url"]
        return datetime.fromtimestamp(int(parse_qs(urlsplit(url).query)["expires"][0]), UTC)

    session_id = any_world.session()
    assert ends(None) > datetime.now(UTC) + timedelta(minutes=59)
    jwt = token(any_world)
    assert ends(jwt) == any_world.service.tokens.read(jwt).expires_at


def test_a_secret_that_somebody_else_knows_is_not_logged_as_its_owners(any_world: World) -> None:
    """An admin makes or rotates a key of a member, and so has its secret."""
    world = any_world
    _, admin = member(world, "admin")
    user_id, own = member(world, "member")
    made = world.post("weft/keys", {"user_id": user_id, "scopes": ["train"]}, key=admin)
    mine = world.post("weft/keys", {"scopes": ["train"]}, key=own)
    rotated = world.post("weft/keys", {"scopes": ["train"]}, key=own)
    taken = world.post(f"weft/keys/{rotated['id']}/rotate", {}, key=admin)
    for key in (made, mine, taken):
        world.session(key["key"])
    with world.database.read() as session:
        made_sessions = session.query(AuditEntry).filter_by(event="session_created").order_by(AuditEntry.id)
        assert [(row.actor, row.key_id) for row in made_sessions] == [
            (f"key:{made['id']}", made["id"]),
            (f"user:{user_id}", mine["id"]),
            (f"key:{rotated['id']}", rotated["id"]),
        ]
    by = [entry["event_details"]["actor"] for entry in world.get("audit")["entries"]]
    assert by[-1] == f"key:{rotated['id']}"
