"""The direct routes answer whatever FastAPI would answer, without FastAPI seeing the requests."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send
from weft.wire.binary.train_codec import encode_train_request

from api.errors import Invalid
from api.http.direct import Direct
from api.http.headers import Ready
from api.routes.computing import batches, training
from api.routes.runs import sessions
from api.routes.server import weft
from api.server.app import DIRECT
from tests.api.conftest import PROTOBUF, World
from tests.api.data import batch

STEP = {"type": "optim_step", "adam_params": {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}}
PATHS = ("optim_step", "forward_backward", "forward", "asample", "retrieve_future")


def both(world: World, path: str, **options: Any) -> list[tuple[int, Any, Any]]:
    """Status, body and headers of the answers by the direct routes, and by FastAPI alone."""
    app, found = world.http.app, list[tuple[int, Any, Any]]()
    assert isinstance(app, FastAPI)
    for stack in (app.build_middleware_stack(), FastAPI.build_middleware_stack(app)):
        app.middleware_stack = stack
        reply = world.http.request(options.get("method", "POST"), f"/api/v1/{path}", **_sent(world, options))
        body = reply.json() if reply.headers["content-type"] == "application/json" else reply.content
        if isinstance(body, dict) and "detail" in body:
            body.pop("request_id", None)  # the id of the HTTP request, unless it is an operation's
        headers = {
            name: value for name, value in reply.headers.items() if name not in ("x-request-id", "content-length")
        }
        found.append((reply.status_code, body, headers))
    return found


def _sent(world: World, options: dict[str, Any]) -> dict[str, Any]:
    headers = {"x-api-key": world.key, **options.get("headers", {})}
    return {"headers": headers} | {name: options[name] for name in ("json", "content") if name in options}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "options",
    [
        {"headers": {"x-api-key": ""}},
        {"headers": {"x-api-key": "tml-nobody"}},
        {"headers": {"x-api-key": "eyJ.forged.token"}},
        {"content": b""},
        {"content": b"{"},
        {"json": {"unknown": 1}},
        {"json": [1, 2]},
        {"content": b"x" * 30_000},
        {"content": b"{}", "headers": {"content-encoding": "gzip"}},
        {"content": b"(", "headers": PROTOBUF},
        {"json": {}, "headers": {"x-weft-priority": "first"}},
        {"method": "GET"},
        {"method": "DELETE"},
        {"method": "PUT"},
    ],
)
def test_refusals_are_the_same(world: World, path: str, options: dict[str, Any]) -> None:
    direct, by_fastapi = both(world, path, **options)
    assert direct == by_fastapi
    assert direct[0] >= 400


def test_answers_are_the_same(world: World) -> None:
    run = world.run()
    direct, again = both(world, "forward_backward", content=encode_train_request(batch(run, 1)), headers=PROTOBUF)
    assert (direct, direct[0]) == (again, 200)
    step = STEP | {"model_id": run, "seq_id": 2}
    direct, again = both(world, "optim_step", json=step)
    assert direct == again
    assert set(direct[1]) == {"request_id", "model_id"}
    asked = {"request_id": direct[1]["request_id"]}
    direct, again = both(world, "retrieve_future", json=asked)
    assert (direct, direct[0]) == (again, 408)
    direct, again = both(world, "retrieve_future", json={"request_id": "0" * 32})
    assert (direct, direct[0]) == (again, 404)
    refused, repeat = both(world, "optim_step", json=step | {"seq_id": 3, "adam_params": {"learning_rate": -1}})
    assert (refused[0], refused[1]["code"], repeat[0]) == (422, "malformed", 200)  # it has used its number


@pytest.mark.parametrize("status", [200, 408])
@pytest.mark.parametrize("kind", ["application/json", "application/x-protobuf"])
def test_a_ready_answer_is_starlettes(kind: str, status: int) -> None:
    ready, other = Ready(b"{}", kind, status), Response(b"{}", status, media_type=kind)
    assert (ready.raw_headers, ready.status_code, ready.body) == (other.raw_headers, other.status_code, other.body)
    ready.headers["x-more"] = "1"
    assert ready.raw_headers[-1] == (b"x-more", b"1")


def test_what_is_refused_leaves_nothing_behind(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies may be large, so they must not stay until the garbage collector finds a cycle."""
    bodies: list[weakref.ref[Body]] = []

    def refuse(_sent: bytes) -> None:
        body = Body()
        bodies.append(weakref.ref(body))
        raise Invalid("no")

    monkeypatch.setattr(batches, "_parse", refuse)
    gc.disable()
    try:
        both(world, "forward_backward", content=b"x", headers=PROTOBUF)
        assert [body() for body in bodies] == [None, None]
    finally:
        gc.enable()


class Body:
    """Stands for the object that a refused request was read into."""


def test_a_request_is_seen_by_one_of_both(world: World) -> None:
    routes = [route for route in training.router.routes if route.endpoint in DIRECT]  # type: ignore[attr-defined]

    async def rest(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 299, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    app = FastAPI()
    app.state.service, app.state.keys = world.service, world.http.app.state.keys  # type: ignore[attr-defined]
    app.build_middleware_stack = lambda: Direct(rest, routes, {})  # type: ignore[method-assign]
    http = TestClient(app, raise_server_exceptions=False)
    assert http.get("/api/v1/optim_step").status_code == 299
    assert http.post("/api/v1/get_info").status_code == 299
    answer = http.post("/api/v1/optim_step")  # no key, and no answer of a direct route
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")


def test_a_route_that_is_no_post_to_a_fixed_path_is_refused() -> None:
    routes = [route for router in (weft.router, sessions.router) for route in router.routes]
    reads = next(route for route in routes if isinstance(route, APIRoute) and route.methods == {"GET"})
    of_many = next(route for route in routes if isinstance(route, APIRoute) and route.path.endswith("/finish"))
    assert of_many.methods == {"POST"}
    for route in (reads, of_many):
        with pytest.raises(TypeError, match=f"{re.escape(route.path)} cannot be called directly"):
            Direct(FastAPI(), [route], {})
