from __future__ import annotations

import pytest
from starlette.requests import Request

from api.errors import Unauthenticated
from api.http.auth import KeyCache, presented_key
from api.state.remembered import REMEMBERED_S
from api.who.principal import Principal
from store.people.keys import revoke
from tests.api.conftest import World


def request(**headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": raw})


def test_a_key_comes_in_either_header() -> None:
    assert presented_key(request(x_api_key="tml-a")) == "tml-a"
    assert presented_key(request(authorization="Bearer tml-b")) == "tml-b"


def test_of_two_headers_of_one_name_the_first_counts() -> None:
    """As Starlette does for all headers, so that no two parts of the server take different keys."""
    asked = request(x_api_key="tml-a")
    asked.scope["headers"].append((b"x-api-key", b"tml-b"))
    assert presented_key(asked) == asked.headers["x-api-key"] == "tml-a"


@pytest.mark.parametrize("headers", [{}, {"x_api_key": " "}, {"authorization": "Basic tml-b"}])
def test_no_key(headers: dict[str, str]) -> None:
    with pytest.raises(Unauthenticated, match="X-API-Key"):
        presented_key(request(**headers))


def test_the_cache_forgets_after_a_few_seconds() -> None:
    now = [0.0]
    cache = KeyCache(lambda: now[0])
    cache.put("digest", Principal("org", 1))
    now[0] = REMEMBERED_S - 0.01
    assert cache.get("digest") == Principal("org", 1)
    now[0] = REMEMBERED_S
    assert cache.get("digest") is None
    assert REMEMBERED_S < 5


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "client/config"),
        ("POST", "client/dynamic_config"),
        ("POST", "create_session"),
        ("POST", "session_heartbeat"),
        ("POST", "sessions/x/finish"),
        ("POST", "telemetry"),
        ("POST", "create_model"),
        ("POST", "get_info"),
        ("POST", "forward_backward"),
        ("POST", "optim_step"),
        ("POST", "save_weights"),
        ("POST", "save_weights_for_sampler"),
        ("POST", "save_weights_external"),
        ("POST", "load_weights"),
        ("POST", "weights_info"),
        ("POST", "create_sampling_session"),
        ("GET", "samplers/x"),
        ("POST", "asample"),
        ("POST", "retrieve_future"),
        ("POST", "cancel_future"),
        ("GET", "get_server_capabilities"),
        ("GET", "auth/apikey/me"),
        ("DELETE", "auth/apikey/me"),
        ("GET", "training_runs"),
        ("GET", "training_runs/x"),
        ("GET", "training_runs/x/checkpoints"),
        ("DELETE", "training_runs/x/checkpoints/weights/y"),
        ("PUT", "training_runs/x/checkpoints/weights/y/ttl"),
        ("GET", "checkpoints"),
        ("GET", "sessions"),
        ("GET", "sessions/x"),
        ("POST", "sessions/search"),
        ("PUT", "sessions/x/project"),
        ("GET", "sessions/x/trace_export"),
        ("POST", "auth/token"),
        ("GET", "audit"),
        ("GET", "billing/usage/events"),
        ("GET", "billing/usage/checkpoints/current"),
        ("GET", "weft/usage"),
        ("GET", "weft/stats"),
        ("GET", "weft/models/a/b/tokenizer"),
        ("GET", "weft/models/a/b/tokenizer/config.json"),
    ],
)
def test_every_endpoint_wants_a_key(world: World, method: str, path: str) -> None:
    for headers in ({}, {"x-api-key": "tml-wrong"}):
        reply = world.http.request(method, f"/api/v1/{path}", headers=headers, content=b"not even json")
        assert reply.status_code == 401
        assert "key" in reply.json()["detail"]


def test_a_revoked_key_stops_working(world: World) -> None:
    assert world.get("weft/stats") == {"queue": {"open": 0, "running": 0, "runs": 0}}
    world.database.write_now(lambda session: revoke(session, world.key))
    world.http.app.state.keys = KeyCache()  # type: ignore[attr-defined]
    world.get("weft/stats", status=401)


def test_a_key_can_revoke_itself_and_a_token_cannot(world: World) -> None:
    token = world.post("auth/token")["jwt"]
    assert world.call("DELETE", "auth/apikey/me", key=token).status_code == 401
    assert world.call("DELETE", "auth/apikey/me").is_success
    world.http.app.state.keys = KeyCache()  # type: ignore[attr-defined]
    for credential in (world.key, token):
        world.get("sessions", key=credential, status=401)
    world.get("sessions", key=world.other_key)


def test_the_key_describes_itself(world: World) -> None:
    me = world.get("auth/apikey/me")
    assert me["key_id"] == 1
    assert world.key.startswith(me["name"])
    assert me["name"] != world.key
    assert me["details"]["org_details"] == {"name": "acme"}
