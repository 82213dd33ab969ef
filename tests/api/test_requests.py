"""Every request has an id: in its answer, in refusals, in the logs, and with its operation. Requests are counted by the
template of their route."""

from __future__ import annotations

import logging
import re

import pytest
from sqlalchemy import select
from weft.wire.binary.train_codec import encode_train_request

from api.state.traffic import Traffic
from store.tables import AuditEntry, Operation
from tests.api.conftest import PROTOBUF, World
from tests.api.data import batch

MADE = re.compile(r"[0-9a-f]{32}")


def traffic(world: World) -> Traffic:
    found: Traffic = world.state.traffic
    return found


def test_an_id_that_is_well_formed_is_kept(world: World) -> None:
    reply = world.call("GET", "weft/usage", headers={"x-request-id": "a.B_c-1"})
    assert reply.headers["x-request-id"] == "a.B_c-1"


@pytest.mark.parametrize("given", [None, "", "a" * 65, "two words", 'quo"te', "semi;colon", "ü", "a,b"])
def test_a_missing_or_malformed_id_is_replaced(world: World, given: str | None) -> None:
    headers = {} if given is None else {"x-request-id": given.encode()}
    reply = world.call("GET", "weft/usage", headers=headers)
    assert MADE.fullmatch(reply.headers["x-request-id"])


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/api/v1/nowhere", 404),
        ("DELETE", "/api/v1/weft/usage", 405),
        ("GET", "/api/v1/training_runs/none", 404),
        ("POST", "/api/v1/optim_step", 422),
        ("GET", "/api/v1/weft/runs/r/metrics?points=1", 422),
    ],
)
def test_refusals_name_the_request_id(world: World, method: str, path: str, status: int) -> None:
    headers = {"x-api-key": world.key, "x-request-id": "mine-1", "content-type": "application/json"}
    reply = world.http.request(method, path, headers=headers, content=b"{" if method == "POST" else None)
    assert (reply.status_code, reply.json()["request_id"]) == (status, "mine-1"), reply.text


@pytest.mark.parametrize("named", ["a" * 65, "unknown", "fe80::1%" + "a" * 65, "192.0.2.1", "::1"])
def test_what_a_proxy_names_as_its_client_is_an_address_or_nobody(world: World, named: str) -> None:
    """PostgreSQL's audit log has no room for other texts, and nobody is to be counted under one."""
    transport = world.http._transport
    transport.client = (named, 0)  # type: ignore[attr-defined]
    world.call("POST", "create_session", json={"sdk_version": "1"}, headers={"x-forwarded-for": named})
    with world.database.read() as session:
        entry = session.scalars(select(AuditEntry).order_by(AuditEntry.id.desc())).first()
    assert entry is not None
    assert (entry.event, entry.ip) == ("session_created", named if named in ("192.0.2.1", "::1") else None)


@pytest.mark.parametrize("path", ["/healthz", "/v1/models", "/openapi.json", "/api/v1/weft/usage", "/api/v1/asample"])
def test_whoever_asks_for_the_head_is_told_what_a_get_would_answer_without_its_body(world: World, path: str) -> None:
    """Probes and `curl -I` send HEAD."""
    whole, head = (world.http.request(method, path, headers={"x-api-key": world.key}) for method in ("GET", "HEAD"))
    assert (head.status_code, head.content) == (whole.status_code, b"")
    sizes = [reply.headers["content-length"] for reply in (whole, head)]
    assert sizes[0] == sizes[1]


def test_without_a_key_too(world: World) -> None:
    reply = world.http.get("/api/v1/weft/usage", headers={"x-request-id": "mine-2"})
    assert (reply.status_code, reply.json()["request_id"]) == (401, "mine-2")


def test_it_goes_with_the_operation_and_into_the_audit_log(world: World) -> None:
    run = world.run()
    world.call("POST", "weft/projects", json={"name": "p"}, headers={"x-request-id": "audit-1"})
    content, sent = encode_train_request(batch(run, 1)), {**PROTOBUF, "x-request-id": "train-1"}
    world.call("POST", "forward_backward", content=content, headers=sent)
    with world.database.read() as session:
        origins = set(session.scalars(select(Operation.origin)))
        noted = set(session.scalars(select(AuditEntry.request_id)))
    assert "train-1" in origins
    assert "audit-1" in noted


def test_log_lines_name_the_routes_template(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="api.http.requests")
    world.call("GET", "training_runs/prompt-of-somebody?text=secret", headers={"x-request-id": "seen-1"})
    (line,) = [record.getMessage() for record in caplog.records if record.name == "api.http.requests"]
    assert line.startswith("GET /api/v1/training_runs/{run_id}: 404 in ")


def test_requests_are_counted_by_template(world: World) -> None:
    for number in range(50):
        world.call("GET", f"training_runs/run-{number}")
        world.http.get(f"/nowhere/{number}")
        world.http.request(f"M{number}", "/healthz")
    counted = traffic(world)
    known = {(method, status): n for (route, method, status), n in counted.answered.items() if "{run_id}" in route}
    assert known == {("GET", "404"): 50}
    assert counted.answered["none", "GET", "404"] == 50
    assert counted.answered["/healthz", "other", "405"] == 50
    assert counted.in_flight == 0
    assert len(counted.seconds) < 10


def test_bodies_are_counted(world: World) -> None:
    run = world.run()
    before = traffic(world).received_bytes["/api/v1/forward_backward"]
    content = encode_train_request(batch(run, 1))
    reply = world.call("POST", "forward_backward", content=content, headers=PROTOBUF)
    counted = traffic(world)
    assert counted.received_bytes["/api/v1/forward_backward"] - before == len(content)
    assert counted.sent_bytes["/api/v1/forward_backward"] == len(reply.content)
