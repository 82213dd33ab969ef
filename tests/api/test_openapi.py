"""`/openapi.json` says what the routes do: which there are, who is let in, and how they refuse. To random requests
tests/e2e/test_api_fuzz.py holds a server's statuses to it."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import time
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
from fastapi.routing import APIRoute
from httpx import ASGITransport, AsyncClient

from api.errors import ApiError
from api.http.client_wheel import ClientWheel
from api.routes.server import probes, sdk
from api.server import reference
from api.server.app import front
from api.server.connections import CODES
from tests.api.conftest import World
from tests.tenancy.conftest import member, routes_of

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
#: Not part of the API: pages for people, and the document itself.
PAGES = {"/", "/docs", "/openapi.json", "/sdk"}

T = TypeVar("T")


@pytest.fixture
def described(world: World) -> dict[str, Any]:
    reply = world.http.get("/openapi.json")
    assert reply.status_code == 200
    found: dict[str, Any] = reply.json()
    return found


def operations(described: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(method.upper(), path, op) for path, ops in described["paths"].items() for method, op in ops.items()]


def test_routes_are_built_once_and_not_again_for_the_first_requests() -> None:
    """Each application builds the routes of `include_router` anew, when they are first looked through."""
    routes = front().routes
    assert all(isinstance(route, APIRoute) for route in routes)
    assert {id(route) for route in probes.router.routes} <= {id(route) for route in routes}


def test_what_anybody_may_fetch_is_written_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody needs a key for these, and writing them takes a processor for a while."""
    first = [world.http.get(path).content for path in ("/openapi.json", "/docs")]
    monkeypatch.setattr(reference, "orjson", None)
    monkeypatch.setattr(reference, "page", None)
    assert [world.http.get(path).content for path in ("/openapi.json", "/docs")] == first


def test_it_is_written_once_however_many_ask_first(monkeypatch: pytest.MonkeyPatch) -> None:
    written, app = list[str](), front()

    def write(what: str, found: T) -> T:
        written.append(what)
        time.sleep(0.01)  # others ask
        return found

    async def ask() -> list[int]:
        async with AsyncClient(transport=ASGITransport(app), base_url="http://x") as http:
            paths = ("/openapi.json", "/docs", "/sdk/") * 3
            return [reply.status_code for reply in await asyncio.gather(*map(http.get, paths))]

    described = {"info": {"version": "1"}, "paths": {}}
    monkeypatch.setattr(reference, "document", lambda _: write("document", described))
    monkeypatch.setattr(sdk, "client_wheel", cache(lambda: write("wheel", ClientWheel(b""))))
    assert asyncio.run(ask()) == [200] * 9
    assert sorted(written) == ["document", "wheel"]


def test_every_route_is_described_and_every_reference_leads_somewhere(described: dict[str, Any]) -> None:
    paths = {(r.method, re.sub(r":\w+}", "}", r.path)) for r in routes_of(front()) if not r.path.startswith("/console")}
    assert {(method, path) for method, path in paths if path not in PAGES} == {o[:2] for o in operations(described)}
    for name in re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(described)):
        assert name in described["components"]["schemas"], name
    for method, path, operation in operations(described):
        takes = "requestBody" in operation
        assert takes <= (method in ("POST", "PUT", "PATCH")), path
        assert set(operation["x-weft"]) == {"scopes", "counts", "meters"}


def test_files_and_redirects_are_described_as_such(described: dict[str, Any]) -> None:
    gets = {path: methods["get"] for path, methods in described["paths"].items() if "get" in methods}
    archive = gets["/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}/archive"]["responses"]
    assert "200" not in archive
    for responses in (archive, *(get["responses"] for path, get in gets.items() if "/downloads/" in path)):
        assert "content" not in responses["302"]
    files = [get["responses"]["200"] for path, get in gets.items() if re.search(r"{file}$|/files/|/sdk/|\.", path)]
    assert len(files) == 7
    assert not [answer for answer in files if "application/json" in answer.get("content", {})]


def test_a_query_has_only_what_a_route_reads(described: dict[str, Any]) -> None:
    (only,) = described["paths"]["/hub/api/models/{name}"]["get"]["parameters"]
    assert (only["name"], only["in"]) == ("name", "path")


def test_who_is_let_in_and_how_routes_refuse(world: World, described: dict[str, Any]) -> None:
    """Without a key, with a key that may do little, and with one that may do all, each with an empty body."""
    _, viewer = member(world, "viewer")
    _, owner = member(world, "owner")
    last = ("DELETE", "/api/v1/auth/apikey/me")  # afterwards the key is gone
    unsaid = []
    for method, path, operation in sorted(operations(described), key=lambda found: found[:2] == last):
        address, secured = re.sub(r"{[^}]*}", "0", path), bool(operation["security"])
        for key in ("", viewer, owner):
            headers = {"x-api-key": key} if key else {}
            reply = world.http.request(method, address, headers=headers, json={})
            if str(reply.status_code) not in operation["responses"]:
                unsaid.append((method, path, reply.status_code, reply.text))
            if not key:
                assert (reply.status_code == 401) == secured, (method, path, reply.text)
            if reply.status_code == 403 and "needs the scope" in reply.text:
                assert all(scope in reply.text for scope in operation["x-weft"]["scopes"])
            if reply.status_code >= 400 and path.startswith("/api/v1"):
                assert {"detail", "code"} <= reply.json().keys(), (method, path, reply.text)
    assert not unsaid


def test_people_find_the_console_and_every_route(world: World, described: dict[str, Any]) -> None:
    assert world.http.get("/", follow_redirects=False).headers["location"] == "/console/"
    page = world.http.get("/docs")
    assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    assert not re.search(r"<script(?![^>]*src=\"/console/static/)|<style| style=| on\w+=|https?://(?!127)", page.text)
    for method, path, _ in operations(described):
        assert f"<code>{method} {path}</code>" in page.text


def error_codes() -> list[tuple[str, int]]:
    """(code, status) of every error class of the API."""
    classes, found = [ApiError], set()
    while classes:
        one = classes.pop()
        found.add((one.code, one.status))
        classes += one.__subclasses__()
    return sorted(found)


def test_the_page_of_errors_has_every_code_with_its_status() -> None:
    rows = re.findall(r"^\| (`[^|]+) \| (\d+) \|", PAGE.read_text(), re.MULTILINE)
    told = {(code.strip("`"), int(status)) for codes, status in rows for code in codes.split(", ")}
    of_no_class = {("method_not_allowed", 405), ("organisation_suspended", 403), ("organisation_closed", 403)}
    before_a_route = {(code, status) for status, code in CODES.items()}
    assert told == set(error_codes()) | of_no_class | before_a_route | refused_by_openai_s_routes()


def refused_by_openai_s_routes() -> set[tuple[str, int]]:
    """What `Refused` is given as its code, wherever it is raised."""
    trees = [ast.parse(path.read_text()) for path in (PAGE.parents[1] / "api" / "routes" / "openai").glob("*.py")]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) == 3]
    codes = [call.args[2] for call in calls if ast.unparse(call.func) == "Refused"]
    return {(code.value, 400) for code in codes if isinstance(code, ast.Constant) and isinstance(code.value, str)}
