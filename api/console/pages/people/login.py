"""Signing in and out: with an API key, or with a link that `weftd user login-link` prints; `sso` is the provider's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated

from fastapi import Form, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from sqlalchemy.orm import Session

from api.console import sessions
from api.console.render import console_router, page
from api.console.security import (
    PREFIX,
    Viewer,
    ViewerDep,
    check_same_site,
    cookie_name,
    give_cookie,
    local_path,
    take_cookie,
)
from api.http.access import declare
from api.oidc.refusals import ProviderError
from api.state.service import Service, ServiceDep
from store.people.keys import find
from store.people.oidc_settings import OidcSettings
from store.people.secret import digest
from store.tables import LoginLink

router = console_router()

_OPEN = declare(scope="public", limit="poll")
BAD_KEY = "This API key is unknown, expired or revoked."
SSO_NEEDED = "Members of this organisation sign in by single sign-on."
BAD_LINK = "This link was used already, or is too old. Ask for a new one: weftd user login-link"


@router.get("/login", **_OPEN)
async def login_page(request: Request, service: ServiceDep, next: str = "", fresh: bool = False) -> HTMLResponse:
    return _page(request, service, local_path(next), fresh=fresh)


@router.post("/login", **_OPEN)
async def login(
    request: Request,
    service: ServiceDep,
    key: Annotated[str, Form(max_length=256)],
    next: Annotated[str, Form(max_length=2048)] = "",
) -> Response:
    key = key.strip()
    return await _sign_in(
        request,
        service,
        lambda session, now: find(session, key, now),
        lambda session, *about: sessions.sign_in_with_key(session, key, *about),
        local_path(next),
        BAD_KEY,
    )


@router.get("/login/{token}", **_OPEN)
async def link_page(request: Request, service: ServiceDep, token: str) -> HTMLResponse:
    """A page with a button: programs that open links before people do must not use the link up."""
    return _page(request, service, PREFIX + "/", token=token)


@router.post("/login/{token}", **_OPEN)
async def login_by_link(request: Request, service: ServiceDep, token: str) -> Response:
    return await _sign_in(
        request,
        service,
        lambda session, _: session.get(LoginLink, digest(token)),
        lambda session, *about: sessions.sign_in_with_link(session, token, *about),
        PREFIX + "/",
        BAD_LINK,
    )


async def _sign_in(
    request: Request,
    service: Service,
    known: Callable[[Session, datetime], object],
    sign_in: Callable[[Session, str, datetime, OidcSettings], str | None],
    to: str,
    refusal: str,
) -> Response:
    """Sign in by `sign_in`, if the secret shown is `known`."""
    check_same_site(request)
    service.attempts.check(request)
    before, now, sid = request.cookies.get(cookie_name(request), ""), datetime.now(UTC), None
    try:
        # so that guesses do not reach the database's writer
        if await service.read(lambda session: known(session, now)):
            sid = await service.database.write(lambda session: sign_in(session, before, now, service.settings.oidc))
    except sessions.SsoNeeded:
        return _page(request, service, to, 403, SSO_NEEDED)
    if sid is None:
        service.attempts.note(request)
        return _page(request, service, to, 401, refusal)
    response = RedirectResponse(to, 303)
    give_cookie(request, response, sid)
    return response


@router.post("/logout", **_OPEN)
async def logout(request: Request, service: ServiceDep, viewer: ViewerDep) -> Response:
    sid = request.cookies.get(cookie_name(request), "")
    await service.database.write(lambda session: sessions.sign_out(session, sid))
    response = Response(status_code=204, headers={"hx-redirect": await _away(service, viewer)})
    take_cookie(request, response, cookie_name(request))
    return response


async def _away(service: Service, viewer: Viewer) -> str:
    """The address that signing out leads to: our own page, or the provider's sign-out page if the settings say so and
    the provider answers."""
    signing_in = service.signing_in
    if signing_in is not None and viewer.by_provider and service.settings.oidc.sign_out_of_provider:
        with suppress(ProviderError):
            return await signing_in.sign_out_address() or f"{PREFIX}/login"
    return f"{PREFIX}/login"


def _page(
    request: Request,
    service: Service,
    next: str,
    status: int = 200,
    problem: str | None = None,
    token: str | None = None,
    fresh: bool = False,
) -> HTMLResponse:
    oidc = service.settings.oidc
    return page(request, "login.html", None, status, next=next, problem=problem, token=token, fresh=fresh, oidc=oidc)
