"""Every route, with the ids of another organisation: nothing is there, nothing is shown, and nothing is changed.

Made from the table of routes: a new route with an id in its path is tried by itself, if its parameter has a name that
is known here; one that takes a body fails this test until it is listed, with the ids that go into it or without any.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from weft.wire.codec import encode_train_request

from api.app import front
from store import people
from tests.api.conftest import MODEL, PROTOBUF, World
from tests.api.data import batch
from tests.api.test_custom_loss import body as custom_loss
from tests.tenancy.conftest import Route, org_id_of, routes_of

ROUTES = [route for route in routes_of(front()) if route.path.startswith("/api/v1")]
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
        "scope": "key",
        "scope_id": ids["key_id"],
        "period": "month",
        "limit_nusd": 10**9,
    },
    "GET /weft/usage": lambda ids: {"params": {"run_id": ids["run_id"]}},
    # These have their id in the path, and a body besides.
    "POST /sessions/{session_id}/finish": lambda ids: {"reason": {"type": "success"}, "detail": None},
    "PUT /sessions/{session_id}/project": lambda ids: {"project_id": "q"},
    "PUT /training_runs/{run_id}/checkpoints/{kind}/{name}/ttl": lambda ids: {"ttl_seconds": None},
    "POST /training_runs/{run_id}/checkpoints/{kind}/{name}/publish": lambda ids: {},
    "POST /weft/runs/{run_id}/metrics": lambda ids: {"points": [{"step": 1, "name": "loss", "value": 1.0}]},
    "POST /weft/keys/{key_id}/rotate": lambda ids: {},
    "PUT /weft/members/{user_id}": lambda ids: {"role": "viewer"},
    "PATCH /weft/projects/{project_id}": lambda ids: {"archived": False},
    "PUT /weft/rate_limits/{scope}/{id}": lambda ids: {},
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
    "POST /weft/projects",
    "POST /weft/billing/topups",
    "POST /stripe/webhook",
}

#: Paths that name no tenant's things, and those that are entered by a signed link instead of a key.
NOT_TENANTS = {"GET /weft/models/{name:path}/tokenizer", "GET /weft/models/{name:path}/tokenizer/{file}"}

#: Reads the weights themselves, of which this test has none (tests/api/test_checkpoints.py has).
ARCHIVE = "GET /training_runs/{run_id}/checkpoints/{kind}/{name}/archive"
#: Takes one kind of checkpoint only.
EXPORTS = "GET /training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls"


def short(route: Route) -> str:
    return str(route).replace("/api/v1", "", 1)


@pytest.fixture
def acme(any_world: World) -> Ids:
    """What acme has, by the names of parameters."""
    world = any_world
    session = world.session()
    run = world.run(session)
    path = world.checkpoint(run, 1)
    export = world.post("save_weights_external", {"model_id": run, "seq_id": 2, "path": "exported"})["request_id"]
    world.finish(export, size_bytes=7)
    sampler = world.post(
        "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    )["sampling_session_id"]
    body = {"sampling_session_id": sampler, "seq_id": 1, "prompt": _PROMPT, "sampling_params": {"max_tokens": 1}}
    request_id = world.post("asample", body | {"num_samples": 1})["request_id"]
    org_id = org_id_of(world)

    def write(writing: Any) -> str:
        people.add_member(writing, org_id, "boss@example.com", "owner")
        people.create_project(writing, org_id, "secret project")
        return people.add_member(writing, org_id, "ann@example.com", "owner").id

    user_id = world.database.write_now(write)
    key = world.post("weft/keys", {"name": "spare"})
    budget = world.call(
        "PUT", "weft/budgets", json={"scope": "key", "scope_id": "1", "period": "month", "limit_nusd": 10**15}
    ).json()
    project = next(p["id"] for p in world.get("weft/projects")["projects"] if p["name"] == "secret project")
    with world.database.read() as reading:
        from store.tables import Checkpoint

        checkpoint_id = reading.query(Checkpoint).filter_by(name="one").one().id
    return {
        "session_id": session,
        "run_id": run,
        "sampler_id": sampler,
        "request_id": request_id,
        "kind": "weights",
        "name": "one",
        "path": path,
        "checkpoint_id": checkpoint_id,
        "user_id": user_id,
        "key_id": str(key["id"]),
        "project_id": project,
        "budget_id": budget["id"],
        "scope": "key",
        "id": str(key["id"]),
    }


def ask(world: World, route: Route, ids: Ids, key: str) -> Any:
    if short(route) == EXPORTS:
        ids = ids | {"kind": "external_weights", "name": "exported"}
    path = re.sub(r"{(\w+)(:path)?}", lambda match: ids[match.group(1)], short(route).split(" ", 1)[1].lstrip("/"))
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


def test_every_route_with_anothers_ids(any_world: World, acme: Ids) -> None:
    world = any_world
    named = sorted((r for r in ROUTES if names_something(r)), key=lambda r: (r.method == "DELETE", "finish" in r.path))
    assert len(named) > 40
    seen = []
    for route in named:
        assert route.access is not None
        reply = ask(world, route, acme, world.other_key)
        if reply.status_code != (403 if route.access.public else 404):
            seen.append((short(route), reply.status_code, reply.text[:300]))
    assert seen == []
    # The same requests by whom the things belong to: they are there, and the test above would have seen them.
    hidden = []
    for route in named:
        assert route.access is not None
        if route.access.public or short(route) == ARCHIVE:
            continue
        reply = ask(world, route, acme, world.key)
        if not (reply.is_success or reply.is_redirect or reply.status_code == 408):
            hidden.append((short(route), reply.status_code, reply.text[:300]))
    assert hidden == []


def test_no_list_shows_anothers_things(any_world: World, acme: Ids) -> None:
    world = any_world
    secret = [acme[name] for name in ("session_id", "run_id", "request_id", "checkpoint_id", "user_id", "budget_id")]
    secret += ["ann@example.com", "secret project", "spare", world.key[:12]]
    hour = {"starting_on": "2026-01-01T00:00:00Z", "ending_before": "2026-01-02T00:00:00Z"}
    for route in ROUTES:
        listing = route.method == "GET" and "{" not in route.path
        if not listing and short(route) != "POST /sessions/search":
            continue
        query = {"access_scope": "accessible", "archived": True, "model": MODEL, **hour}
        options = {"json": {"owner": {"type": "accessible"}}} if route.method == "POST" else {"params": query}
        reply = world.call(route.method, short(route).split("/", 1)[1], key=world.other_key, **options)
        assert reply.status_code == 200, (short(route), reply.text)
        assert not [text for text in secret if text in reply.text], short(route)
