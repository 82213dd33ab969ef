"""Every route, with the ids of another organisation, and with those of another project of the same organisation by a
key that is bound to one: nothing is there, nothing is shown, and nothing is changed.

Made from the table of routes: a new route with an id in its path is tried by itself, if its parameter has a name that
is known here; one that takes a body fails this test until it is listed, with the ids that go into it or without any.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import pytest
from weft.wire.binary.train_codec import encode_train_request

from api.server.app import front
from store import tables
from store.people import organisations
from store.people.keys import new_key
from store.people.roles import BEYOND_A_PROJECT, SCOPES
from tests.api.conftest import MODEL, PROTOBUF, World
from tests.api.data import batch
from tests.api.test_custom_loss import body as custom_loss
from tests.tenancy.conftest import Route, org_id_of, routes_of

ROUTES = [route for route in routes_of(front()) if route.path.startswith("/api/v1")]
DOORS_AT_TOP = ("/tokenize", "/detokenize")
Ids = dict[str, str]

_PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}

#: Bodies that name things by id. `ids` are another organisation's, but for the sequence number.
BODIES: dict[str, Callable[[Ids], dict[str, Any]]] = {
    "POST /session_heartbeat": lambda ids: {"session_id": ids["session_id"]},
    "POST /create_model": lambda ids: {"session_id": ids["session_id"], "model_seq_id": 7, "base_model": MODEL},
    "POST /get_info": lambda ids: {"model_id": ids["run_id"]},
    "POST /optim_step": lambda ids: {"model_id": ids["run_id"], "seq_id": 50, "adam_params": {}},
    "POST /forward_backward": lambda ids: {
        "content": encode_train_request(batch(ids["run_id"], 51)),
        "headers": PROTOBUF,
    },
    "POST /forward": lambda ids: {"model_id": ids["run_id"], "seq_id": 52, "forward_input": {"data": []}},
    "POST /create_custom_loss": lambda ids: custom_loss(ids["session_id"]),
    "POST /save_weights": lambda ids: {"model_id": ids["run_id"], "seq_id": 53, "path": "x"},
    "POST /save_weights_for_sampler": lambda ids: {"model_id": ids["run_id"], "seq_id": 54, "path": "x"},
    "POST /save_weights_external": lambda ids: {"model_id": ids["run_id"], "seq_id": 55, "path": "x"},
    "POST /load_weights": lambda ids: {"model_id": ids["run_id"], "seq_id": 56, "path": ids["path"], "optimizer": True},
    "POST /weights_info": lambda ids: {"tinker_path": ids["path"]},
    "POST /create_sampling_session": lambda ids: {
        "session_id": ids["session_id"],
        "sampling_session_seq_id": 9,
        "base_model": MODEL,
    },
    "POST /asample": lambda ids: {
        "sampling_session_id": ids["sampler_id"],
        "seq_id": 60,
        "prompt": _PROMPT,
        "num_samples": 1,
        "sampling_params": {"max_tokens": 1},
    },
    "POST /retrieve_future": lambda ids: {"request_id": ids["request_id"]},
    "POST /stream_future": lambda ids: {"request_id": ids["request_id"], "timeout": 0},
    "POST /cancel_future": lambda ids: {"request_id": ids["request_id"]},
    "POST /join_sampling_session": lambda ids: {"sampling_session_id": ids["sampler_id"]},
    "POST /retrieve_futures": lambda ids: {
        "target": {"sampling_session_id": ids["sampler_id"], "cloned_sampler_id": 0},
        "prev_cursor": 0,
        "timeout": 0,
    },
    "POST /copy_weights": lambda ids: {"source_path": ids["path"], "destination_project_id": "default"},
    "POST /weft/keys": lambda ids: {"user_id": ids["user_id"]},
    "PUT /weft/budgets": lambda ids: {
        "scope": ids["scope"],
        "scope_id": ids["id"],
        "period": "month",
        "limit_nusd": 10**9,
    },
    "GET /weft/usage": lambda ids: {"params": {"run_id": ids["run_id"]}},
    # These have their id in the path, and a body besides.
    "POST /sessions/{session_id}/finish": lambda ids: {"reason": {"type": "success"}, "detail": None},
    "PUT /sessions/{session_id}/project": lambda ids: {"project_id": ids["project_id"]},
    "PUT /training_runs/{run_id}/checkpoints/{kind}/{name}/ttl": lambda ids: {"ttl_seconds": None},
    "POST /training_runs/{run_id}/checkpoints/{kind}/{name}/publish": lambda ids: {},
    "POST /weft/runs/{run_id}/metrics": lambda ids: {"points": [{"step": 1, "name": "loss", "value": 1.0}]},
    "PUT /weft/runs/{run_id}/notes": lambda ids: {"notes": "x"},
    "POST /weft/keys/{key_id}/rotate": lambda ids: {},
    "PUT /weft/members/{user_id}": lambda ids: {"role": "viewer"},
    "PATCH /weft/projects/{project_id:path}": lambda ids: {"archived": False},
    "PUT /weft/rate_limits/{scope}/{id:path}": lambda ids: {},
}

#: Routes that take a body in which nothing of a tenant's can be named.
NO_IDS = {
    "POST /client/config",
    "POST /client/dynamic_config",
    "POST /auth/token",
    "POST /telemetry",
    "POST /create_session",  # a project's id is only known within its organisation
    "POST /sessions/search",  # lists; what it lists is looked at below
    "POST /weft/members",
    "POST /weft/invitations",
    "POST /weft/projects",
    "POST /weft/billing/topups",
    "POST /stripe/webhook",
}

#: Paths that name nothing of a tenant's, or need a signed link instead of a key.
NOT_TENANTS = {"GET /weft/models/{name:path}/tokenizer", "GET /weft/models/{name:path}/tokenizer/{file:path}"}

#: A key that is bound to a project may use these, but only within that project; tests below try copying.
WITHIN_ONES_PROJECT = {"POST /weft/keys", "POST /copy_weights"}

#: Reads the weights themselves, which do not exist in this test (tests/api/test_checkpoints.py has some).
ARCHIVE = "GET /training_runs/{run_id}/checkpoints/{kind}/{name}/archive"
#: Works for one kind of checkpoint only.
EXPORTS = "GET /training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls"


def short(route: Route) -> str:
    return str(route).replace("/api/v1", "", 1)


@dataclass(frozen=True)
class Sides:
    """What acme owns, by the names of route parameters; the owner's key, and a key of an intruder."""

    ids: Ids
    owner: str
    intruder: str
    #: Whether the intruder belongs to the same organisation: then a 403 tells what their key's scopes do not allow.
    colleagues: bool


@pytest.fixture
def two_organisations(any_world: World) -> Sides:
    return Sides(things(any_world), any_world.key, any_world.other_key, False)


@pytest.fixture
def projects(any_world: World) -> Sides:
    """Two keys of the same owner of acme, bound to two of its projects."""
    world, admin = any_world, any_world.key
    org_id = org_id_of(world)

    def write(session: Any) -> list[str]:
        user = organisations.add_member(session, org_id, "ann@example.com", "owner")
        names = ("secret project", "elsewhere")
        bound = [organisations.create_project(session, org_id, name).id for name in names]
        return [new_key(session, org_id, user_id=user.id, project_id=project)[1] for project in bound]

    here, elsewhere = world.database.write_now(write)
    world.key = here
    ids = things(world, admin)
    world.key = admin
    return Sides(ids, here, elsewhere, True)


@pytest.fixture(params=["two_organisations", "projects"])
def sides(request: pytest.FixtureRequest) -> Sides:
    found: Sides = request.getfixturevalue(request.param)
    return found


def things(world: World, admin: str | None = None) -> Ids:
    """One of everything, made with the world's key; by an admin what that may not."""
    session = world.session()
    run = world.run(session)
    path = world.checkpoint(run, 1)
    export = world.post("save_weights_external", {"model_id": run, "seq_id": 2, "path": "exported"})["request_id"]
    with world.service.blobs.new_folder(f"weights/{export}") as folder:  # as the trainer would
        (folder / "adapter_model.safetensors").write_bytes(b"weights")
    world.finish(export, size_bytes=7)
    sampler = world.post(
        "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    )["sampling_session_id"]
    body = {"sampling_session_id": sampler, "seq_id": 1, "prompt": _PROMPT, "sampling_params": {"max_tokens": 1}}
    request_id = world.post("asample", body | {"num_samples": 1})["request_id"]
    org_id = org_id_of(world)
    with world.database.read() as reading:
        project_of = reading.get_one(tables.Session, session).project_id

    def write(writing: Any) -> str:
        turn = {
            "request_id": f"of {org_id} {project_of}",
            "ref": "turns/xx/none",
            "size_bytes": 1,
            "created_at": datetime.now(UTC),
        }
        writing.add(tables.SessionTurn(org_id=org_id, project_id=project_of, name=f"talk {session}", **turn))
        organisations.add_member(writing, org_id, "boss@example.com", "owner")
        if admin is None:
            organisations.create_project(writing, org_id, "secret project")
            return organisations.add_member(writing, org_id, "ann@example.com", "owner").id
        return next(user.id for _, user in organisations.members(writing, org_id) if user.email == "ann@example.com")

    user_id = world.database.write_now(write)
    key = world.post("weft/keys", {"name": "spare", "scopes": ["train"]})
    limit = {"scope": "key", "scope_id": "1", "period": "month", "limit_nusd": 10**15}
    invited = {"role": "viewer", "email": "guest@example.com"}
    invitation = world.call("POST", "weft/invitations", key=admin, json=invited).json()
    budget = world.call("PUT", "weft/budgets", key=admin, json=limit).json()
    project = next(p["id"] for p in world.get("weft/projects")["projects"] if p["name"] == "secret project")
    with world.database.read() as reading:
        from store.tables import Checkpoint

        checkpoint_id = reading.query(Checkpoint).filter_by(name="one").one().id
    return {
        "session_id": session,
        "run_id": run,
        "sampler_id": sampler,
        "request_id": request_id,
        "session": f"talk {session}",
        "kind": "weights",
        "name": "one",
        "path": path,
        "checkpoint_id": checkpoint_id,
        "user_id": user_id,
        "key_id": str(key["id"]),
        "project_id": project,
        "invitation_id": invitation["id"],
        "budget_id": budget["id"],
        "scope": "key",
        "id": str(key["id"]),
    }


def ask(world: World, route: Route, ids: Ids, key: str) -> Any:
    if short(route) == EXPORTS:
        ids = ids | {"kind": "external_weights", "name": "exported"}
    path = short(route).split(" ", 1)[1].lstrip("/")
    path = re.sub(r"{(\w+)(:path)?}", lambda match: quote(ids[match.group(1)]), path)
    options: dict[str, Any] = {"key": key}
    if short(route) in BODIES:
        body = BODIES[short(route)](ids)
        options |= body if body.keys() & {"content", "params"} else {"json": body}
    elif route.method != "GET":
        options["json"] = {}
    return world.call(route.method, path, **options)


def names_something(route: Route) -> bool:
    return short(route) not in NOT_TENANTS and ("{" in route.path or short(route) in BODIES)


def test_every_route_with_a_body_is_listed() -> None:
    with_body = {short(route) for route in ROUTES if route.method in ("POST", "PUT", "PATCH")}
    assert with_body - BODIES.keys() - NO_IDS == set()
    assert BODIES.keys() - {short(route) for route in ROUTES} == set()


@pytest.mark.parametrize("scope", ["key", "project"])
def test_every_route_with_an_id_that_no_database_takes(any_world: World, scope: str) -> None:
    """Refused like any id that does not exist: PostgreSQL takes no NUL."""
    ids: Ids = defaultdict(lambda: "\0", scope=scope, kind="weights")
    replies = {str(route): ask(any_world, route, ids, any_world.key) for route in ROUTES if names_something(route)}
    assert {route: reply.text for route, reply in replies.items() if reply.status_code >= 500} == {}


def test_no_route_finds_or_changes_anothers_things(any_world: World, sides: Sides) -> None:
    world = any_world
    named = sorted((r for r in ROUTES if names_something(r)), key=lambda r: (r.method == "DELETE", "finish" in r.path))
    if sides.colleagues:
        named = [route for route in named if short(route) not in WITHIN_ONES_PROJECT]
    assert len(named) > 40
    seen, refused = [], 0
    for route in named:
        reply = ask(world, route, sides.ids, sides.intruder)
        expected = expected_status(world, route, sides)
        refused += expected == 404
        if reply.status_code != expected:
            seen.append((short(route), reply.status_code, expected, reply.text[:300]))
    assert seen == []
    assert refused > 30
    # The owner sends the same requests and finds the things: so the test above would have seen them.
    hidden = []
    for route in named:
        if expected_status(world, route, sides) == 403 or short(route) == ARCHIVE:
            continue
        reply = ask(world, route, sides.ids, sides.owner)
        if not (reply.is_success or reply.is_redirect or reply.status_code == 408):
            hidden.append((short(route), reply.status_code, reply.text[:300]))
    assert hidden == []


def expected_status(world: World, route: Route, sides: Sides) -> int:
    """The status of an intruder's request: 404, or 403 if their key may not use the route at all."""
    assert route.access is not None
    scopes = SCOPES - BEYOND_A_PROJECT if sides.colleagues else SCOPES
    return 403 if route.access.public or not route.access.allows(scopes) else 404


#: Routes for other APIs' clients, with a request that names a model in its body, and asks too much, so nobody waits.
DOORS: dict[str, Callable[[str], dict[str, Any]]] = {
    "POST /v1/completions": lambda model: {"model": model, "prompt": [1] * 99},
    "POST /v1/chat/completions": lambda model: {"model": model, "messages": [{"role": "user", "content": "a b " * 99}]},
    "POST /v1/chat/completions/tokens": lambda model: {"model": model, "tokens": [1] * 99},
    "POST /v1/responses": lambda model: {"model": model, "input": "a b " * 99},
    "POST /inference/v1/generate": lambda model: {"model": model, "token_ids": [1] * 99},
    **{f"POST {at}/tokenize": lambda model: {"model": model, "prompt": "a"} for at in ("", "/v1")},
    **{f"POST {at}/detokenize": lambda model: {"model": model, "tokens": [1]} for at in ("", "/v1")},
}


def test_no_route_of_another_api_opens_anothers_weights(any_world: World, sides: Sides) -> None:
    """Named as a run and as a path; its owner finds it by either name."""
    world, ids = any_world, sides.ids
    doors = [route for route in routes_of(front()) if route.path.startswith(("/v1/", "/inference/", *DOORS_AT_TOP))]
    assert {str(route) for route in doors if route.method != "GET"} == DOORS.keys()
    world.key, key = sides.owner, world.key
    path = world.checkpoint(ids["run_id"], 3, "sampled", sampler=True)
    world.key = key
    for route in doors:
        if route.path == "/v1/models":
            continue  # the base models
        for model in (f"run:{ids['run_id']}", path):
            asked = route.path.replace("{name:path}", model)
            body = {"json": DOORS[str(route)](model)} if str(route) in DOORS else {}
            found = {}
            for who in (sides.intruder, sides.owner):
                reply = world.http.request(route.method, asked, headers={"x-api-key": who}, **body)
                error = reply.json().get("error") or {"code": "", "message": ""}
                found[who] = (reply.status_code, error["code"])
                assert who == sides.owner or "sampled" not in error["message"].replace(model, "")
            assert found[sides.intruder] == (404, "model_not_found"), route
            assert found[sides.owner] in [(200, ""), (400, "context_length_exceeded")], route


def test_no_list_shows_anothers_things(any_world: World, sides: Sides) -> None:
    world, ids = any_world, sides.ids
    secret = [ids[name] for name in ("session_id", "run_id", "request_id", "checkpoint_id", "budget_id")]
    secret += ["secret project", "spare", sides.owner[:12]]
    if not sides.colleagues:
        secret += [ids["user_id"], "ann@example.com"]
    hour = {"starting_on": "2026-01-01T00:00:00Z", "ending_before": "2026-01-02T00:00:00Z"}
    shown = ""
    for route in ROUTES:
        listing = route.method == "GET" and "{" not in route.path
        if not listing and short(route) != "POST /sessions/search":
            continue
        assert route.access is not None
        query = {"access_scope": "accessible", "archived": True, "model": MODEL, **hour}
        options = {"json": {"owner": {"type": "accessible"}}} if route.method == "POST" else {"params": query}
        path = short(route).split("/", 1)[1]
        reply = world.call(route.method, path, key=sides.intruder, **options)
        allowed = not sides.colleagues or route.access.public or route.access.allows(SCOPES - BEYOND_A_PROJECT)
        usage_of_all = sides.colleagues and short(route) == "GET /weft/usage"
        assert reply.status_code == (200 if allowed and not usage_of_all else 403), (short(route), reply.text)
        assert not [text for text in secret if text in reply.text], short(route)
        shown += world.call(route.method, path, key=sides.owner, **options).text
    assert all(ids[name] in shown for name in ("session_id", "run_id", "project_id"))


def test_weights_of_another_project_are_read_when_published_or_lent(any_world: World, projects: Sides) -> None:
    """And by a key that is bound to no project; but a key lends only what it may read."""
    world, ids = any_world, projects.ids
    body = {"source_path": ids["path"], "destination_project_id": "elsewhere"}
    world.post("copy_weights", body, key=projects.intruder, status=404)
    lent = world.post("copy_weights", body | {"weights_access_token": projects.owner}, key=projects.intruder)
    own = world.post("copy_weights", {"source_path": lent["tinker_path"], "destination_project_id": "elsewhere"})
    world.post("copy_weights", body | {"weights_access_token": projects.intruder}, key=world.other_key, status=404)
    outside = {"source_path": ids["path"], "destination_project_id": "default"}
    world.post("copy_weights", outside | {"weights_access_token": projects.owner}, key=world.other_key)
    assert own["tinker_path"] != lent["tinker_path"]
    bills = world.post("weft/keys", {"scopes": ["billing:read"]})["key"]
    refused = world.post("copy_weights", outside | {"weights_access_token": bills}, key=world.other_key, status=400)
    assert "may read weights" in refused["detail"]
    path = f"training_runs/{ids['run_id']}/checkpoints/weights/one/publish"
    world.post(path, key=projects.owner)
    world.post("weights_info", {"tinker_path": ids["path"]}, key=projects.intruder)
    for key in (projects.intruder, world.other_key):
        refused = world.post(path, key=key, status=404)
        assert f"{ids['path']} is published, but not yours: copy it" in refused["detail"]


def test_a_session_takes_its_things_along_into_another_project(any_world: World, projects: Sides) -> None:
    world, ids = any_world, projects.ids
    world.call("PUT", f"sessions/{ids['session_id']}/project", json={"project_id": "elsewhere"})
    for key, status in ((projects.intruder, 200), (projects.owner, 404)):
        world.get(f"training_runs/{ids['run_id']}?access_scope=accessible", key=key, status=status)
        world.get(f"samplers/{ids['sampler_id']}", key=key, status=status)


def test_the_same_idempotency_key_in_another_project_is_another(any_world: World, projects: Sides) -> None:
    body = {"tags": [], "user_metadata": {}, "sdk_version": "1"}
    headers = {"x-idempotency-key": "same"}
    made = [
        any_world.call("POST", "create_session", key=key, json=body, headers=headers).json()["session_id"]
        for key in (projects.owner, projects.owner, projects.intruder)
    ]
    assert made[0] == made[1] != made[2]


def test_results_are_not_given_up_for_another_project(any_world: World, projects: Sides) -> None:
    """A poll for a sampler of one's own names the results that one has already; others' results stay."""
    world, ids = any_world, projects.ids
    world.finish(ids["request_id"], b"result")
    session = world.session(projects.intruder)
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = world.post("create_sampling_session", body, key=projects.intruder)["sampling_session_id"]
    told = {
        "target": {"sampling_session_id": sampler, "cloned_sampler_id": 0},
        "prev_cursor": 0,
        "timeout": 0,
        "retrieved_request_ids": [ids["request_id"]],
    }
    world.post("retrieve_futures", told, key=projects.intruder)
    assert world.outcome(ids["request_id"], key=projects.owner).content == b"result"
