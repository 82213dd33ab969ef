"""Projects, and keys that are bound to one."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest

from store.tables import Operation, Sampler, Session
from tests.api.conftest import MODEL, World
from tests.api.data import batch
from tests.tenancy.conftest import member, routes_of

BODY: dict[str, Any] = {"tags": [], "user_metadata": {}, "sdk_version": "1"}


def session_in(world: World, project: str | None = None, key: str | None = None, status: int = 200) -> Any:
    body = BODY if project is None else BODY | {"project_id": project}
    return world.post("create_session", body, key=key, status=status)


@pytest.fixture
def bound(any_world: World) -> str:
    """A key that is bound to the project `p`."""
    project = any_world.post("weft/projects", {"name": "p"})["id"]
    return str(any_world.post("weft/keys", {"project_id": project})["key"])


def project_of(world: World, session_id: str) -> str | None:
    with world.database.read() as session:
        return session.get_one(Session, session_id).project_id


def test_a_project_is_made_renamed_and_archived(any_world: World) -> None:
    world = any_world
    made = world.post("weft/projects", {"name": "night runs"})
    assert (made["name"], made["archived_at"]) == ("night runs", None)
    assert "exists already" in world.post("weft/projects", {"name": "night runs"}, status=400)["detail"]
    world.post("weft/projects", {"name": "night runs"}, key=world.other_key)
    path = f"weft/projects/{made['id']}"
    assert world.call("PATCH", path, json={"name": "day runs"}).json()["name"] == "day runs"
    world.call("PATCH", path, json={"archived": True})
    assert world.get("weft/projects")["projects"] == []
    assert [p["name"] for p in world.get("weft/projects?archived=true")["projects"]] == ["day runs"]
    assert "is archived" in session_in(world, made["id"], status=400)["detail"]
    world.call("PATCH", path, json={"archived": False})
    session_in(world, made["id"])


@pytest.mark.parametrize("name", ["ml/research", "/", "..", "a?b#c", "50 %", "Größe"])
def test_a_projects_id_is_found_in_paths(any_world: World, name: str) -> None:
    """Whatever name made it; also as the id of a session's project, as Tinker's clients read it."""
    for number, made in enumerate((any_world.post("weft/projects", {"name": name}), None)):
        if made is None:
            session = session_in(any_world, f"{name}/2")["session_id"]
            made = {"id": project_of(any_world, session), "name": f"{name}/2"}
        id = quote(str(made["id"]), safe="" if number else "/")
        assert any_world.get(f"weft/projects/{id}")["name"] == made["name"]
        assert any_world.call("PUT", f"weft/rate_limits/project/{id}", json={"max_in_flight": 3}).is_success
        archived = any_world.call("PATCH", f"weft/projects/{id}", json={"archived": True})
        assert archived.json()["archived_at"] is not None


@pytest.mark.parametrize("name", ["", " a", "a\n", "x" * 129])
def test_names_of_projects(world: World, name: str) -> None:
    assert "name: must be" in world.post("weft/projects", {"name": name}, status=400)["detail"]


def test_a_session_names_a_project_by_id_or_by_name(any_world: World) -> None:
    made = any_world.post("weft/projects", {"name": "default"})  # a name that cannot be an id
    assert made["id"] != "default"
    assert project_of(any_world, session_in(any_world, made["id"])["session_id"]) == made["id"]
    assert project_of(any_world, session_in(any_world, "default")["session_id"]) is None


def test_an_admin_makes_a_project_by_naming_it_and_a_member_does_not(any_world: World) -> None:
    _, key = member(any_world, "member")
    assert "no project 'new'" in session_in(any_world, "new", key, status=404)["detail"]
    session_in(any_world, "new")
    session = session_in(any_world, "new", key)["session_id"]
    assert project_of(any_world, session) == "new"
    assert any_world.call("PUT", f"sessions/{session}/project", key=key, json={"project_id": "default"}).is_success


def test_a_member_changes_only_what_is_his(any_world: World) -> None:
    _, key = member(any_world, "member")
    others = any_world.run()
    any_world.checkpoint(others, 1)
    path = f"training_runs/{others}/checkpoints/weights/one"
    for method, suffix, body in (("PUT", "/ttl", {"ttl_seconds": None}), ("POST", "/publish", {}), ("DELETE", "", {})):
        reply = any_world.call(method, path + suffix, key=key, json=body)
        assert (reply.status_code, reply.json()["code"]) == (403, "forbidden"), reply.text
    session = any_world.session()
    reply = any_world.call("PUT", f"sessions/{session}/project", key=key, json={"project_id": "default"})
    assert reply.status_code == 403
    sampling = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = any_world.post("create_sampling_session", sampling)["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    sample = {"sampling_session_id": sampler, "num_samples": 1, "prompt": prompt, "sampling_params": {"max_tokens": 1}}
    asked = any_world.post("asample", sample | {"seq_id": 1})["request_id"]
    refused: tuple[tuple[str, Any], ...] = (
        (f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None}),
        ("create_model", {"session_id": session, "model_seq_id": 5, "base_model": MODEL, "lora_config": {"rank": 4}}),
        ("create_sampling_session", sampling | {"sampling_session_seq_id": 1}),
        ("optim_step", {"model_id": others, "seq_id": 2, "adam_params": {}}),
        ("load_weights", {"model_id": others, "seq_id": 2, "path": f"tinker://{others}/weights/one"}),
        (f"weft/runs/{others}/metrics", {"points": [{"step": 1, "name": "loss", "value": 1.0}]}),
        ("cancel_future", {"request_id": asked}),
    )
    for path, body in refused:
        assert any_world.post(path, body, key=key, status=403)["code"] == "forbidden", path
    any_world.train(batch(others, 2), status=403, key=key)
    any_world.train(batch(others, 2))  # refused requests use no sequence number
    # Any member may do what changes nothing: sample, read, or go on from others' weights in a run of their own.
    any_world.post("asample", sample | {"seq_id": 2}, key=key)
    own = any_world.run(any_world.session(key), key=key)
    request_id = any_world.post("save_weights", {"model_id": own, "seq_id": 1, "path": "mine"}, key=key)["request_id"]
    any_world.finish(request_id, size_bytes=7)
    assert any_world.call("DELETE", f"training_runs/{own}/checkpoints/weights/mine", key=key).is_success


def test_nobody_makes_the_session_of_a_colleagues_requests_at_the_doors(any_world: World) -> None:
    """The owner of a session decides to which project it is billed, and may move it to another."""
    world = any_world
    (_, secret), victim = member(world, "member", "eve@example.com"), member(world, "member")
    body = {"tags": [], "user_metadata": {}, "sdk_version": "1"}
    headers = {"x-idempotency-key": f"user:{victim[0]} openai"}
    made = world.call("POST", "create_session", key=secret, json=body, headers=headers).json()["session_id"]
    assert world.http.get(f"/v1/models/{MODEL}", headers={"x-api-key": victim[1]}).is_success
    with world.database.read() as session:
        owner = session.get_one(Session, session.query(Sampler).one().session_id)
    assert (owner.id != made, owner.user_id) == (True, victim[0])


def test_a_bound_key_makes_sessions_in_its_project(any_world: World, bound: str) -> None:
    for named in (None, "p"):
        assert project_of(any_world, session_in(any_world, named, bound)["session_id"]) == "p"
    for named in ("default", "q"):
        assert "bound to the project p" in session_in(any_world, named, bound, status=403)["detail"]


def test_a_bound_key_spends_for_its_project_only(any_world: World, bound: str) -> None:
    run = any_world.run()
    any_world.train(batch(run, 1), status=404, key=bound)
    session = any_world.session()
    body = {"session_id": session, "model_seq_id": 5, "base_model": MODEL, "lora_config": {"rank": 4}}
    any_world.post("create_model", body, key=bound, status=404)
    own = any_world.run(session_in(any_world, None, bound)["session_id"], key=bound)
    request_id = any_world.train(batch(own, 1), key=bound)["request_id"]
    with any_world.database.read() as reading:
        row = reading.get_one(Operation, request_id)
    assert (row.project_id, row.key_id) == ("p", 3)


def test_a_bound_key_does_not_manage_the_organisation(any_world: World, bound: str) -> None:
    for method, path in (
        ("POST", "weft/projects"),
        ("GET", "audit"),
        ("GET", "weft/balance"),
        ("POST", "weft/members"),
    ):
        assert any_world.call(method, path, key=bound, json={}).status_code == 403
    made = any_world.post("weft/keys", {"scopes": ["train"]}, key=bound, status=403)
    assert "only an admin" in made["detail"]


def test_routes_of_finds_the_routes(world: World) -> None:
    app: Any = world.http.app
    assert "POST /api/v1/create_session" in {str(route) for route in routes_of(app)}
