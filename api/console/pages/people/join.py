"""Becoming a member by an invitation: what its link shows, and the button that uses it.

A visitor signs in by the OpenID provider (`sso`), is signed in already, or has a link that was made for their address.
Opening the link does not use it up: joining takes a button on our own page.
"""

from __future__ import annotations

import hmac
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import Form, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from sqlalchemy.orm import Session

from api.console import sessions
from api.console.render import console_router, page
from api.console.security import PREFIX, check_same_site, cookie_name, csrf_token, give_cookie
from api.errors import Forbidden
from api.http.access import declare
from api.state.service import Service, ServiceDep
from api.who.inviting import MADE_BY_NOBODY, STALE, join, still_meant
from api.who.reach import Reach, beyond
from store.database.caller import SERVER, Caller, acting_as
from store.people import invitations
from store.people.oidc_settings import OidcSettings
from store.people.organisations import PeopleError, user_with
from store.tables import Invitation, Organisation, User

router = console_router()

_OPEN = declare(scope="public", limit="poll")
SIGN_IN_FIRST = "Sign in as yourself first, with your key or by the provider, and open this link again."


@router.get("/join/{secret}", **_OPEN)
async def invitation(request: Request, service: ServiceDep, secret: str) -> HTMLResponse:
    service.attempts.check(request)
    return await _page(request, service, secret)


@router.post("/join/{secret}", **_OPEN)
async def use(
    request: Request, service: ServiceDep, secret: str, csrf: Annotated[str, Form(max_length=128)] = ""
) -> Response:
    """Join as the person the link was made for, or as the person who is signed in already and sends this session's
    `csrf`."""
    check_same_site(request)
    service.attempts.check(request)
    now, oidc = datetime.now(UTC), service.settings.oidc
    sid = request.cookies.get(cookie_name(request), "")
    own = sid if csrf and hmac.compare_digest(csrf.encode(), csrf_token(service.secret, sid).encode()) else ""
    address = request.client.host if request.client is not None else None

    try:
        with acting_as(Caller(None, SERVER.actor, address)):
            begun = await service.database.write(lambda session: _join(session, secret, own, sid, now, oidc))
    except (Forbidden, PeopleError) as error:
        return await _page(request, service, secret, 403, str(error))
    response = RedirectResponse(PREFIX + "/", 303)
    give_cookie(request, response, begun)
    return response


def _join(session: Session, secret: str, own: str, before: str, now: datetime, oidc: OidcSettings) -> str:
    """The session of a new member: the person signed in by session `own`, if there is one, or else the person the link
    names."""
    row = invitations.find(session, secret, now)
    if row is None:
        raise Forbidden(STALE)
    if sessions.sso_required(session.get_one(Organisation, row.org_id), oidc):
        raise Forbidden("Members of this organisation sign in by the provider.")
    user = _visitor(session, own, now, oidc) or _named(session, row)
    join(session, secret, user, now)
    return sessions.sign_in_member(session, row.org_id, user.id, before, now, row.made_by)


def _visitor(session: Session, sid: str, now: datetime, oidc: OidcSettings) -> User | None:
    """The person who is signed in; None unless the session is known to be that person's own, and allows all that the
    person may do."""
    found = sessions.signed_in(session, sid, now, oidc) if sid else None
    if found is None:
        return None
    who = found.who
    weak = beyond(who.reach, Reach.of_member(who.role))
    return session.get(User, who.user_id) if who.user_id and who.in_person and not who.link_by and not weak else None


def _named(session: Session, row: Invitation) -> User:
    """The person for whom the inviter made the link."""
    if row.email is None:
        raise Forbidden(SIGN_IN_FIRST)
    return user_with(session, row.email)


async def _page(
    request: Request, service: Service, secret: str, status: int = 200, problem: str | None = None
) -> HTMLResponse:
    now, oidc = datetime.now(UTC), service.settings.oidc
    sid = request.cookies.get(cookie_name(request), "")

    def read(session: Session) -> dict[str, Any] | None:
        row = invitations.find(session, secret, now)
        if row is None:
            return None
        org = session.get_one(Organisation, row.org_id)
        visitor = _visitor(session, sid, now, oidc)
        return {
            "organisation": org.name,
            "role": row.role,
            "email": row.email,
            "until": row.expires_at,
            "visitor": visitor.email if visitor is not None else None,
            "here": not sessions.sso_required(org, oidc) and (visitor is not None or row.email is not None),
            "problem": problem if still_meant(session, row) else MADE_BY_NOBODY,
        }

    found = await service.read(read)
    if found is None or problem:
        service.attempts.note(request)
    if found is None:
        return page(request, "join.html", None, 404, invited=None, problem=STALE, secret="", csrf="", oidc=oidc)
    csrf = csrf_token(service.secret, sid) if found["visitor"] else ""
    values = {"secret": secret, "csrf": csrf, "oidc": oidc, "problem": found["problem"]}
    return page(request, "join.html", None, status, invited=found, **values)
