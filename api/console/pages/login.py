"""Signing in and out: with an API key, or with a link that `weftd user login-link` prints."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Form, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from api.console import sessions
from api.console.render import ConsoleRoute, page
from api.console.security import (
    PREFIX,
    ViewerDep,
    check_same_site,
    cookie_name,
    give_cookie,
    local_path,
    take_cookie,
)
from api.http.access import declare
from api.state.service import ServiceDep
from store.keys import find
from store.tables import LoginLink

router = APIRouter(route_class=ConsoleRoute)

_OPEN = declare(scope="public", limit="poll")
BAD_KEY = "This API key is unknown, expired or revoked."
BAD_LINK = "This link was used already, or is too old. Ask for a new one: weftd user login-link"


@router.get("/login", **_OPEN)
async def login_page(request: Request, next: str = "") -> HTMLResponse:
    return page(request, "login.html", None, next=local_path(next), problem=None, token=None)


@router.post("/login", **_OPEN)
async def login(
    request: Request,
    service: ServiceDep,
    key: Annotated[str, Form(max_length=256)],
    next: Annotated[str, Form(max_length=2048)] = "",
) -> Response:
    check_same_site(request)
    now, sid = datetime.now(UTC), None
    if await service.read(lambda session: find(session, key.strip(), now)):  # who guesses does not get to the writer
        sid = await service.database.write(lambda session: sessions.sign_in_with_key(session, key.strip(), now))
    if sid is None:
        return page(request, "login.html", None, 401, next=local_path(next), problem=BAD_KEY, token=None)
    return _enter(request, sid, local_path(next))


@router.get("/login/{token}", **_OPEN)
async def link_page(request: Request, token: str) -> HTMLResponse:
    """A button, because programs that look at links before people do must not use them up."""
    return page(request, "login.html", None, next=PREFIX + "/", problem=None, token=token)


@router.post("/login/{token}", **_OPEN)
async def login_by_link(request: Request, service: ServiceDep, token: str) -> Response:
    check_same_site(request)
    now, sid = datetime.now(UTC), None
    if await service.read(lambda session: session.get(LoginLink, sessions.digest(token))):
        sid = await service.database.write(lambda session: sessions.sign_in_with_link(session, token, now))
    if sid is None:
        return page(request, "login.html", None, 401, next=PREFIX + "/", problem=BAD_LINK, token=None)
    return _enter(request, sid, PREFIX + "/")


@router.post("/logout", **_OPEN)
async def logout(request: Request, service: ServiceDep, viewer: ViewerDep) -> Response:
    sid = request.cookies.get(cookie_name(request), "")
    await service.database.write(lambda session: sessions.sign_out(session, sid))
    response = Response(status_code=204, headers={"hx-redirect": f"{PREFIX}/login"})
    take_cookie(request, response)
    return response


def _enter(request: Request, sid: str, to: str) -> Response:
    response = RedirectResponse(to, 303)
    give_cookie(request, response, sid)
    return response
