"""Adds the console to the application: pages under /console, static files, headers; and an HTML page for browsers that
ask for an unknown path."""

from __future__ import annotations

from functools import cache

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, RedirectResponse

from api.console.pages import overview, search
from api.console.pages.paying import billing, budgets, limits, ownership, usage
from api.console.pages.people import audit, join, keys, login, members, sso
from api.console.pages.runs import checkpoints, compare, listing, playground, queues, run
from api.console.render import STATIC, console_router, failed_page, looks
from api.console.security import HEADERS, PREFIX, SecurityHeaders
from api.errors import NotFound, quote
from api.http.access import declare

router = console_router()

PAGES = (
    login,
    sso,
    join,
    overview,
    usage,
    listing,
    run,
    compare,
    search,
    checkpoints,
    queues,
    playground,
    keys,
    members,
    budgets,
    limits,
    billing,
    audit,
    ownership,
)


def install(app: FastAPI) -> None:
    for module in PAGES:
        app.router.routes += module.router.routes
    app.router.routes += router.routes
    app.add_middleware(SecurityHeaders)


def astray(request: Request, detail: str) -> Response | None:
    """The page for a browser that asks for an unknown path, with a link home."""
    if not looks(request):
        return None
    reply = failed_page(request, 404, detail)
    reply.headers.update(HEADERS | {"cache-control": "no-store"})
    return reply


@router.get("", **declare(scope="public", limit="poll"))
async def front_door() -> RedirectResponse:
    return RedirectResponse(PREFIX + "/", 308)


@router.get("/static/{name:path}", **declare(scope="public", limit="poll"))
async def static(name: str) -> FileResponse:
    """A file of the console. Its address has its hash, so it may be kept for ever."""
    if name not in _files():
        raise NotFound(f"no file {quote(name)} of the console")
    return FileResponse(STATIC / name, headers={"cache-control": "public, max-age=31536000, immutable"})


@cache
def _files() -> frozenset[str]:
    return frozenset(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file())
