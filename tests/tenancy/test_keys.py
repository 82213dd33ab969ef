"""Keys: what they may do, how long they are valid, and how soon they stop being so."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text, update

from api.http.auth import KeyCache
from api.state.last_used import LastUsed
from api.state.remembered import REMEMBERED_S
from store.blobs.folder import FolderBlobs
from store.database.db import Database
from store.people import organisations
from store.people.keys import find, revoke
from store.settings import Settings
from store.tables import ApiKey
from tests.api.conftest import World, open_world
from tests.tenancy.conftest import forget_keys, member, org_id_of
from workers.model.card import ModelCard


def make(world: World, key: str | None = None, status: int = 200, **body: Any) -> Any:
    return world.post("weft/keys", body, key=key, status=status)


def test_a_secret_is_shown_once(any_world: World) -> None:
    made = make(any_world, name="ci", scopes=["sample"])
    assert made["key"].startswith(made["prefix"] + "_")
    assert made["key"].endswith(made["last4"])
    listed = any_world.get("weft/keys")["keys"]
    assert [row["name"] for row in listed] == ["ci", ""]
    assert "key" not in listed[0]
    assert made["key"] not in any_world.call("GET", "weft/keys").text
    with any_world.database.read() as session:
        row = session.get_one(ApiKey, made["id"])
        assert made["key"] not in {str(value) for value in vars(row).values()}
    any_world.get("weft/stats", key=made["key"])


def test_a_key_has_its_scopes_only(any_world: World) -> None:
    key = make(any_world, scopes=["sample"])["key"]
    reply = any_world.call("POST", "create_model", key=key, json={})
    assert (reply.status_code, reply.json()["code"]) == (403, "forbidden")
    assert "needs the scope train; this key has sample" in reply.json()["detail"]
    any_world.session(key)
    assert make(any_world, key=key, status=403, scopes=["train"])["code"] == "forbidden"


def test_nobody_gets_a_key_that_may_more_than_he(any_world: World) -> None:
    """Neither by making one nor by taking over an existing one by rotating it."""
    _, admin = member(any_world, "admin")
    owner_id, owner = member(any_world, "owner")
    for body in ({}, {"user_id": owner_id}):
        assert "has the scope admin of an owner" in make(any_world, key=admin, status=403, **body)["detail"]
    make(any_world, key=admin, scopes=["train", "sample"])
    owners = any_world.get("weft/keys", key=owner)["keys"][1]
    any_world.post(f"weft/keys/{owners['id']}/rotate", {}, key=admin, status=403)
    user_id, everything = member(any_world, "member")
    sampling = make(any_world, key=everything, scopes=["sample"])["key"]
    whole = next(row for row in any_world.get("weft/keys", key=sampling)["keys"] if row["scopes"] == ["admin"])
    assert whole["user_id"] == user_id
    refused = any_world.post(f"weft/keys/{whole['id']}/rotate", {}, key=sampling, status=403)["detail"]
    assert "scopes: admin, billing:read, billing:write, checkpoints:read, checkpoints:write, train" in refused
    any_world.post(f"weft/keys/{whole['id']}/rotate", {}, key=everything)


def test_a_members_key_sees_and_ends_no_keys_of_others(any_world: World) -> None:
    _, mine = member(any_world, "member")
    made = make(any_world, key=mine, scopes=["train"])
    assert [row["id"] for row in any_world.get("weft/keys", key=mine)["keys"]] == [made["id"], 3]  # not acme's key 1
    for method in ("GET", "DELETE"):
        assert any_world.call(method, "weft/keys/1", key=mine).status_code == 404


def test_a_role_bounds_the_keys_of_its_user(any_world: World) -> None:
    user_id, key = member(any_world, "member")
    any_world.session(key)
    any_world.call("PUT", f"weft/members/{user_id}", json={"role": "viewer"})
    forget_keys(any_world)
    assert any_world.call("POST", "create_session", key=key, json={}).status_code == 403
    any_world.get("training_runs", key=key)
    assert any_world.call("DELETE", f"weft/members/{user_id}").is_success
    forget_keys(any_world)
    any_world.get("training_runs", key=key, status=401)


def test_a_key_says_whose_it_is(any_world: World) -> None:
    _, key = member(any_world, "viewer", "ann@example.com")
    details = any_world.get("auth/apikey/me", key=key)["details"]
    assert details == {"org_details": {"name": "acme"}, "user_details": {"email": "ann@example.com"}}


def test_an_expired_key_is_refused(any_world: World) -> None:
    soon = datetime.now(UTC) + timedelta(hours=1)
    made = make(any_world, expires_at=soon.isoformat())
    with any_world.database.read() as session:
        assert find(session, made["key"], soon - timedelta(seconds=1)) is not None
        assert find(session, made["key"], soon) is None
    make(any_world, status=400, expires_at=datetime(2020, 1, 1, tzinfo=UTC).isoformat())


def test_an_end_that_no_clock_reaches(any_world: World) -> None:
    """Some say "never" by the last possible day. In the time zone of a database in Berlin it falls into the year 10000,
    which Python cannot read: then nobody could list the organisation's keys any more."""
    for never in ("9999-12-31T23:59:59Z", "9999-12-31T23:59:59-14:00"):
        assert "leave it out" in make(any_world, status=400, expires_at=never)["detail"]
    made = make(any_world, expires_at="9998-12-31T23:59:59-14:00")
    if any_world.database.url.startswith("postgresql"):
        with any_world.database.read() as session:
            session.execute(text("SET timezone = 'Pacific/Kiritimati'"))  # the easternmost time zone
            assert session.get_one(ApiKey, made["id"]).expires_at is not None


@pytest.mark.parametrize("name", ["two\nlines", "a\x1b[2J", "\u202eredro"])
def test_a_name_is_of_characters_that_one_can_see(any_world: World, name: str) -> None:
    reply = any_world.call("POST", "weft/keys", json={"name": name, "scopes": ["sample"]})
    assert (reply.status_code, "printable" in reply.json()["detail"]) == (400, True)


def test_rotation_overlaps(any_world: World) -> None:
    made = make(any_world)
    again = any_world.post(f"weft/keys/{made['id']}/rotate", {"overlap_seconds": 3600})
    assert (again["id"], again["prefix"]) == (made["id"], made["prefix"])
    assert again["key"] != made["key"]
    later = datetime.now(UTC) + timedelta(seconds=3601)
    with any_world.database.read() as session:
        assert find(session, made["key"]) is not None
        assert find(session, made["key"], later) is None
        assert find(session, again["key"], later) is not None
    session_id = any_world.session(made["key"])
    assert any_world.get("sessions", key=again["key"])["sessions"] == [session_id]
    at_once = any_world.post(f"weft/keys/{made['id']}/rotate", {"overlap_seconds": 0})
    with any_world.database.read() as session:
        assert [find(session, key["key"]) is not None for key in (made, again, at_once)] == [False, False, True]


def test_revoked_everywhere_within_five_seconds(
    settings: Settings, card: ModelCard, any_database: Database, blobs: FolderBlobs
) -> None:
    """Another API process on the same database remembers keys by itself; the test moves its clock."""
    now = [0.0]
    assert REMEMBERED_S < 5
    other = Database(any_database.url)
    with open_world(settings, card, any_database, blobs) as one, open_world(settings, card, other, blobs) as two:
        two.http.app.state.keys = KeyCache(lambda: now[0])  # type: ignore[attr-defined]
        made = make(one)
        two.get("weft/stats", key=made["key"])
        assert one.call("DELETE", f"weft/keys/{made['id']}").is_success
        now[0] = 5.0
        two.get("weft/stats", key=made["key"], status=401)
    other.close()


def test_a_key_that_was_revoked_makes_no_other_in_the_seconds_for_which_it_is_remembered(any_world: World) -> None:
    any_world.get("sessions")
    any_world.database.write_now(lambda session: revoke(session, any_world.key))
    any_world.get("sessions")
    for path in ("weft/keys", "auth/token"):
        any_world.post(path, {}, status=401)


def test_last_used_to_the_minute(any_database: Database) -> None:
    from tests.keys import create_key

    any_database.write_now(lambda session: create_key(session, "acme"))
    now = [datetime(2026, 11, 20, 12, tzinfo=UTC)]
    used = LastUsed(any_database, lambda: now[0])

    def at() -> datetime | None:
        with any_database.read() as session:
            return session.get_one(ApiKey, 1).last_used_at

    async def main() -> None:
        assert at() is None
        for second in (0, 30, 59):
            now[0] = datetime(2026, 11, 20, 12, 0, second, tzinfo=UTC)
            used.note(1)
        assert await used.flush() == 1
        assert at() == datetime(2026, 11, 20, 12, tzinfo=UTC)
        used.note(1)
        assert await used.flush() == 0
        now[0] += timedelta(minutes=1)
        used.note(1)
        assert await used.flush() == 1
        assert at() == now[0]

    asyncio.run(main())


def test_requests_note_their_key(any_world: World) -> None:
    any_world.get("weft/stats")
    any_world.http.portal.call(any_world.service.last_used.flush)  # type: ignore[union-attr]
    assert any_world.get("weft/keys")["keys"][0]["last_used_at"] is not None


@pytest.mark.parametrize("status", ["suspended", "closed"])
def test_a_suspended_organisation_is_refused_everything(any_world: World, status: str) -> None:
    org_id = org_id_of(any_world)

    def set_status(to: str) -> None:
        def write(session: Any) -> None:
            from store.tables import Organisation

            organisations.set_status(session, session.get_one(Organisation, org_id), to)

        any_world.database.write_now(write)
        forget_keys(any_world)

    set_status(status)
    reply = any_world.call("GET", "sessions")
    assert (reply.status_code, reply.json()["code"]) == (403, f"organisation_{status}")
    assert ("see its billing page" in reply.json()["detail"]) == (status == "suspended")
    any_world.get("sessions", key=any_world.other_key)
    set_status("past_due")
    any_world.get("sessions")


def test_a_key_older_than_scopes_has_all_of_them(any_world: World) -> None:
    any_world.database.write_now(lambda session: session.execute(update(ApiKey).values(name="old")))
    assert any_world.get("weft/keys/1")["scopes"] == ["admin"]


def test_a_member_has_a_number_of_keys_and_leaves_the_others_theirs(
    any_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.routes.people.keys.MAX_KEYS_OF_A_MEMBER", 3)
    one, other = (member(any_world, "member", f"{name}@acme.example")[1] for name in ("one", "other"))
    mine = [make(any_world, one, scopes=["train"]) for _ in range(2)]
    refused = make(any_world, one, scopes=["train"], status=400)
    assert "has 3 keys, which is the limit: revoke some first" in refused["detail"]
    make(any_world, other, scopes=["train"])
    make(any_world)
    any_world.call("DELETE", f"weft/keys/{mine[0]['id']}", key=one)
    soon = (datetime.now(UTC) + timedelta(seconds=0.5)).isoformat()
    make(any_world, one, scopes=["train"], expires_at=soon)
    make(any_world, one, scopes=["train"], status=400)
