"""What a stranger finds first: `/` leads to the console, `/docs` shows every route, `/openapi.json` tells programs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import orjson
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from api.console.render import page
from api.console.security import HEADERS, PREFIX
from api.http.access import declare
from api.server.openapi import document
from api.state.threads import Threads

router = APIRouter()
_pages: dict[FastAPI, bytes] = {}
#: Written by one request at a time: anybody may ask, and all would write the same.
_writing = Threads(1)


@dataclass(frozen=True)
class Shown:
    """A route as the page shows it."""

    method: str
    path: str
    does: str
    who: str
    parameters: tuple[str, ...]
    body: str
    statuses: tuple[tuple[str, str], ...]

    @property
    def curl(self) -> str:
        """A call of the route with curl."""
        key = "" if self.who == "everybody" else ' -H "X-API-Key: $WEFT_API_KEY"'
        sends = " --json @body.json" if self.body else ""
        method = "" if self.method == "GET" or (self.method == "POST" and sends) else f" -X {self.method}"
        return f'curl{method}{key}{sends} "$WEFT_BASE_URL{self.path}"'


@router.get("/", include_in_schema=False, **declare(scope="public", limit="poll"))
async def door() -> RedirectResponse:
    return RedirectResponse(PREFIX + "/", 307)


@router.get("/openapi.json", include_in_schema=False, **declare(scope="public", limit="poll"))
async def openapi(request: Request) -> Response:
    return Response(await _writing.run("reference", partial(_json, request.app)), media_type="application/json")


@router.get("/docs", include_in_schema=False, **declare(scope="public", limit="poll"))
async def docs(request: Request) -> Response:
    return HTMLResponse(await _writing.run("reference", partial(_html, request.app, request)), headers=HEADERS)


@cache
def _json(app: FastAPI) -> bytes:
    return orjson.dumps(_document(app))


def _html(app: FastAPI, request: Request) -> bytes:
    """The page, written once: it is the same for everybody."""
    if app not in _pages:
        described = _document(app)
        shown = page(request, "reference.html", None, version=described["info"]["version"], groups=groups_of(described))
        _pages[app] = bytes(shown.body)
    return _pages[app]


@cache
def _document(app: FastAPI) -> dict[str, Any]:
    return document(app)


def groups_of(described: dict[str, Any]) -> dict[str, list[Shown]]:
    """The routes of a document, by subject."""
    groups: dict[str, list[Shown]] = {}
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            groups.setdefault(operation["tags"][0], []).append(_shown(path, method, operation))
    return dict(sorted(groups.items()))


def _shown(path: str, method: str, operation: dict[str, Any]) -> Shown:
    scopes = operation["x-weft"]["scopes"]
    who = {"public": "everybody", "any": "every key"}.get(scopes[0], f"keys with {' or '.join(scopes)}")
    bodies = operation.get("requestBody", {}).get("content", {})
    named = [
        f"{kind}{' ' + content['schema']['$ref'].rpartition('/')[2] if '$ref' in content.get('schema', {}) else ''}"
        for kind, content in bodies.items()
    ]
    return Shown(
        method.upper(),
        path,
        operation.get("description", operation.get("summary", "")),
        who,
        tuple(f"{one['name']} ({one['in']})" for one in operation.get("parameters", ())),
        " or ".join(named),
        tuple((status, said["description"]) for status, said in operation["responses"].items()),
    )
