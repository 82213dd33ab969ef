"""Every route says what it needs, and every role is held to it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from starlette.responses import Response as Reply
from weft.wire.base import Response as Answer

from api.server.app import front
from store.people.roles import ALLOWED, ROLES, SCOPES
from tests.api.conftest import World
from tests.tenancy.conftest import Route, member, routes_of

ROUTES = routes_of(front())

#: Routes that need no key, and what guards them instead.
PUBLIC = {
    "GET /api/v1/healthz": "says nothing",
    "GET /api/v1/readyz": "says nothing about anybody",
    "GET /api/v1/downloads/{checkpoint_id}/files/{name:path}": "a signed link",
    "GET /api/v1/downloads/{checkpoint_id}/checkpoint.tar": "a signed link",
    "GET /api/v1/sessions/{session_id}/trace.pftrace": "a signed link",
    "GET /": "leads to the console",
    "GET /docs": "the description of the API, the same for everybody",
    "GET /openapi.json": "likewise",
    "GET /sdk": "the client, which is no secret",
    "GET /sdk/": "the client, which is no secret",
    "GET /sdk/{name}": "the client, which is no secret",
    "POST /api/v1/stripe/webhook": "Stripe's signature",
}

#: What each role may do, written by hand, not read from the table that is tested.
EXAMPLES: list[tuple[str, str, str]] = [
    ("POST", "forward_backward", "owner admin member"),
    ("POST", "asample", "owner admin member"),
    ("DELETE", "training_runs/x/checkpoints/weights/y", "owner admin member"),
    ("GET", "training_runs", "owner admin member viewer"),
    ("GET", "billing/usage/checkpoints/current", "owner admin billing-admin viewer"),
    ("GET", "audit", "owner admin"),
    ("POST", "weft/members", "owner admin"),
    ("POST", "weft/projects", "owner admin"),
    ("GET", "weft/limits", "owner admin billing-admin member viewer"),
]


def test_every_route_declares_scope_limit_and_meter() -> None:
    assert len(ROUTES) > 60
    assert [str(route) for route in ROUTES if route.access is None] == []
    for route in ROUTES:
        assert route.access is not None
        unknown = set(route.access.scopes) - SCOPES - {"any", "public"}
        assert not unknown, route


def test_routes_without_a_key_are_known() -> None:
    """A new route without a key must be thought about. Those of the console need a signed-in person (tests/console)."""
    public = {str(r) for r in ROUTES if r.access and r.access.public and not r.path.startswith("/console")}
    assert public <= PUBLIC.keys() | {"GET /health", "GET /healthz", "GET /readyz", "GET /livez"}


def test_what_makes_operations_is_counted_as_work() -> None:
    metered = [r for r in ROUTES if r.access and r.access.meters in ("train", "prefill", "sample")]
    assert {str(r) for r in metered} == {
        "POST /api/v1/forward_backward",
        "POST /api/v1/forward",
        "POST /api/v1/asample",
        "POST /v1/completions",
        "POST /v1/chat/completions",
        "POST /v1/chat/completions/tokens",
        "POST /v1/responses",
        "POST /inference/v1/generate",
        "POST /console/playground",
    }
    assert all(r.access and r.access.limit == "work" for r in metered)


def test_every_route_answers_with_a_class_of_the_wire() -> None:
    """A class of the wire types or, where the route encodes by hand, a response."""
    assert [str(r) for r in ROUTES if not (isinstance(r.answer, type) and issubclass(r.answer, (Answer, Reply)))] == []


def _ask(world: World, route: Route, key: str) -> Any:
    path = re.sub(r"{[^}]*}", "0", route.path)
    return world.http.request(route.method, path, headers={"x-api-key": key}, json={})


@pytest.mark.parametrize("role", ROLES)
def test_every_role_against_every_route(world: World, role: str) -> None:
    _, key = member(world, role)
    own = [r for r in ROUTES if r.access and not r.access.public]
    last = "DELETE /api/v1/auth/apikey/me"  # afterwards the key is gone
    for route in sorted(own, key=lambda r: str(r) == last):
        assert route.access is not None
        reply = _ask(world, route, key)
        refused = reply.status_code == 403 and "needs the scope" in reply.text
        assert refused != route.access.allows(ALLOWED[role]), (str(route), reply.text)
        assert reply.status_code not in (401, 500), (str(route), reply.text)


@pytest.mark.parametrize(("method", "path", "allowed"), EXAMPLES)
def test_roles_in_words(world: World, method: str, path: str, allowed: str) -> None:
    for role in ROLES:
        _, key = member(world, role)
        reply = world.call(method, path, key=key, json={})
        assert (reply.status_code == 403) == (role not in allowed.split()), (role, reply.text)
        if reply.status_code == 403:
            assert re.search(r"needs the scope [a-z:]+", reply.json()["detail"])
            assert f"(role {role})" in reply.json()["detail"]
