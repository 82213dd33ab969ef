"""Organisations with many keys, members and projects: what lists show, and the limits that keep one organisation's long
list from holding up everybody."""

from __future__ import annotations

import pytest

from api.routes.people import keys
from store.people import organisations
from tests.api.conftest import World
from tests.tenancy.conftest import member


def test_of_keys_that_have_ended_the_newest_are_told(any_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "MAX_ENDED", 2)
    made = [any_world.post("weft/keys", {"name": f"job {number}"}) for number in range(5)]
    for row in made[:4]:
        assert any_world.call("DELETE", f"weft/keys/{row['id']}").is_success
    told = [row["name"] for row in any_world.get("weft/keys")["keys"]]
    assert told == ["job 4", "job 3", "job 2", ""]
    assert any_world.get(f"weft/keys/{made[0]['id']}")["name"] == "job 0"  # it still exists


def test_limits_of_keys_that_have_ended_are_not_told(any_world: World) -> None:
    made = [any_world.post("weft/keys", {"name": f"job {number}"})["id"] for number in range(3)]
    for key_id in made[:2]:
        assert any_world.call("PUT", f"weft/rate_limits/key/{key_id}", json={"max_in_flight": 3}).is_success
    assert any_world.call("DELETE", f"weft/keys/{made[0]}").is_success
    told = [(row["scope"], row["id"]) for row in any_world.get("weft/rate_limits")["limits"]]
    assert told[1:] == [("key", str(made[1]))]


def test_members(any_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(organisations, "MAX_MEMBERS", 1)
    user_id, _ = member(any_world, "owner")
    body = {"email": "more@example.com", "role": "member"}
    assert "has 1 members, which is the limit" in any_world.post("weft/members", body, status=400)["detail"]
    any_world.post("weft/members", body, key=any_world.other_key)
    monkeypatch.setattr(organisations, "MAX_MEMBERS", 2)
    any_world.post("weft/members", body)
    assert any_world.call("PUT", f"weft/members/{user_id}", json={"role": "owner"}).is_success


def test_projects(any_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(organisations, "MAX_PROJECTS", 1)
    any_world.post("weft/projects", {"name": "p"})
    session = {"tags": [], "user_metadata": {}, "sdk_version": "1"}
    for path, body in (("weft/projects", {"name": "q"}), ("create_session", session | {"project_id": "q"})):
        assert "has 1 projects, which is the limit" in any_world.post(path, body, status=400)["detail"]
    any_world.post("create_session", session | {"project_id": "p"})
    any_world.post("weft/projects", {"name": "q"}, key=any_world.other_key)
