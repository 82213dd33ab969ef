"""Signing in by the OpenID provider of the settings (`api.oidc`): to it, and back from it.

A sign-in begins with a button of our own pages, so no other site can begin one in somebody's browser, and ends only in
the browser that began it, which has its cookie.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

from fastapi import Form, Request, Response
from fastapi.responses import RedirectResponse
from sqlalchemy import select
from sqlalchemy.orm import Session

from api.console import sessions
from api.console.render import console_router, page
from api.console.security import check_same_site, cookie_name, give_cookie, local_path, set_cookie, take_cookie
from api.errors import Forbidden, NotFound, Unavailable
from api.http.access import declare
from api.oidc.refusals import NotProved, ProviderError, Unwelcome
from api.state.service import Service, ServiceDep
from api.who.inviting import join
from store.database.caller import SERVER, Caller, acting_as
from store.people import identities
from store.people.identities import Account
from store.people.oidc_settings import OidcSettings
from store.people.organisations import PeopleError
from store.tables import Membership, Organisation, User

if TYPE_CHECKING:
    from api.oidc.flow import Flow, SigningIn

log = logging.getLogger(__name__)

router = console_router()

_OPEN = declare(scope="public", limit="poll")
#: How long the browser keeps a sign-in that it has begun.
COOKIE_LIFE_S = 600
AWAY = "The sign-in provider cannot be asked just now. Try again in a minute; if it stays so, ask {contact}."
NOT_BEGUN = (
    "This sign-in was not begun in this browser, or more than ten minutes ago, or another was begun after it. "
    "Begin again."
)
NOT_PROVED = "The provider's answer does not prove who you are. Begin again; if it stays so, ask {contact}."
NO_GROUP = (
    "You are signed in at {name} as {email}, and nothing here is open to you: you are in no group that Weft knows."
)
NOT_THERE = "You are not a member of that organisation."


@router.post("/sso", **_OPEN)
async def begin(
    request: Request,
    service: ServiceDep,
    next: Annotated[str, Form(max_length=2048)] = "",
    org: Annotated[str, Form(max_length=64)] = "",
    invitation: Annotated[str, Form(max_length=128)] = "",
    fresh: Annotated[bool, Form()] = False,
) -> Response:
    """Send the browser to the provider. htmx does it, because the CSP refuses a form whose answer redirects
    elsewhere."""
    check_same_site(request)
    service.attempts.check(request)
    signing_in = _signing_in(service)
    try:
        to, cookie = await signing_in.begin(local_path(next), org_id=org, invitation=invitation, fresh=fresh)
    except ProviderError as error:
        log.warning("sign-in: %s", error)
        raise Unavailable(AWAY.format(contact=service.settings.oidc.contact)) from None
    part = "hx-request" in request.headers
    response = Response(status_code=204, headers={"hx-redirect": to}) if part else RedirectResponse(to, 303)
    set_cookie(request, response, flow_cookie(request), cookie, COOKIE_LIFE_S)
    return response


@router.get("/sso/callback", **_OPEN)
async def callback(request: Request, service: ServiceDep) -> Response:
    """Where the provider sends the browser back to."""
    service.attempts.check(request)
    signing_in = _signing_in(service)
    flow = signing_in.begun(request.cookies.get(flow_cookie(request), ""), request.query_params.get("state", ""))
    if flow is not None:
        response = await _answered(request, service, signing_in, flow)
        take_cookie(request, response, flow_cookie(request))
    else:  # the cookie may be of a sign-in in another tab, which can still be finished
        response = _refused(request, service, 400, NOT_BEGUN)
    if response.status_code >= 400:
        service.attempts.note(request)
    return response


async def _answered(request: Request, service: Service, signing_in: SigningIn, flow: Flow) -> Response:
    settings = service.settings.oidc
    try:
        account = await signing_in.finish(flow, request.query_params)
        entered = await _enter(request, service, flow, account)
    except ProviderError as error:
        log.warning("sign-in: %s", error)
        return _refused(request, service, 502, AWAY.format(contact=settings.contact))
    except NotProved as error:
        log.warning("sign-in: %s", error)
        return _refused(request, service, 400, NOT_PROVED.format(contact=settings.contact))
    except (Unwelcome, PeopleError, Forbidden) as error:
        log.info("sign-in refused: %s", type(error).__name__)
        return _refused(request, service, 403, str(error))
    if entered.sid is not None:
        response = RedirectResponse(flow.next, 303)
        give_cookie(request, response, entered.sid)
        return response
    if entered.choices:
        return page(request, "sso_choose.html", None, choices=entered.choices, next=flow.next, email=account.email)
    nothing = NOT_THERE if flow.org_id else NO_GROUP.format(name=settings.name, email=account.email)
    return _refused(request, service, 403, entered.says or nothing)


async def _enter(request: Request, service: Service, flow: Flow, account: Account) -> Entered:
    now, settings = datetime.now(UTC), service.settings.oidc
    address = request.client.host if request.client is not None else None
    before, to = request.cookies.get(cookie_name(request), ""), {"org_id": flow.org_id, "invitation": flow.invitation}
    with acting_as(Caller(None, SERVER.actor, address)):
        return await service.database.write(
            lambda session: enter(session, account, before, settings, now, **to),
            # two tabs may be handled by two replicas: one of them makes the account that both need
            lock=f"account {account.email}",
        )


def _signing_in(service: Service) -> SigningIn:
    if service.signing_in is None:
        raise NotFound("this server has no sign-in by an OpenID provider: sign in with an API key")
    return service.signing_in


def _refused(request: Request, service: Service, status: int, says: str) -> Response:
    oidc = service.settings.oidc
    return page(request, "sso_refused.html", None, status, says=says, contact=oidc.contact, name=oidc.name)


def flow_cookie(request: Request) -> str:
    return cookie_name(request) + "_sso"


@dataclass(frozen=True)
class Entered:
    """`sid` is the new session; None with `choices`, (id, name) of each organisation, where there are several, or with
    none where there is nothing for them here. `says` is why organisations that they are members of do not let them
    in."""

    sid: str | None = None
    choices: tuple[tuple[str, str], ...] = ()
    says: str = ""


def enter(
    session: Session,
    account: Account,
    before: str,
    settings: OidcSettings,
    now: datetime,
    *,
    org_id: str,
    invitation: str,
) -> Entered:
    """Raises PeopleError or Forbidden when the account, or the invitation, cannot be used; then nothing is changed."""
    wanted = identities.roles_by_groups(session, account.groups, settings.groups)
    user = identities.user_of(session, account)
    if user is None and not (wanted or invitation):
        return Entered()
    user = identities.link(session, account)
    refused = identities.follow_groups(session, user, account.issuer, wanted)
    if invitation:
        org_id = join(session, invitation, user, now, account.email).org_id
    asked = [choice for choice in _organisations(session, user) if not org_id or choice[0] == org_id]
    chosen = [choice for choice in asked if choice[0] not in refused]
    if len(chosen) != 1:
        says = " ".join(f"{name} does not let you in: {refused[id]}." for id, name in asked if id in refused)
        return Entered(choices=tuple(chosen), says=says)
    life_s = settings.session_life_s
    return Entered(sessions.sign_in_with_account(session, chosen[0][0], user.id, before, account, now, life_s))


def _organisations(session: Session, user: User) -> list[tuple[str, str]]:
    query = select(Organisation.id, Organisation.name).join(Membership, Membership.org_id == Organisation.id)
    mine = query.where(Membership.user_id == user.id, Organisation.status != "closed")
    return [(org_id, name) for org_id, name in session.execute(mine.order_by(Organisation.name))]
