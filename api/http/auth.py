"""Who is asking: an API key names the organisation that all lookups are scoped by. It comes in `X-API-Key` or as a
bearer token, itself or exchanged for a short-lived token (`api.who.tokens`). `api.console` makes principals of its own,
for people who have signed in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, TypeVar

from fastapi import Depends, Request
from sqlalchemy.orm import Session
from starlette.types import Scope

from api.errors import Forbidden, InvalidToken, Unauthenticated
from api.http.headers import header
from api.state.remembered import Remembered
from api.state.service import service_of
from api.state.threads import check_line
from api.who.principal import ENDED, Principal, principal_of
from api.who.signing import LinkRefused
from api.who.tokens import PREFIX as TOKEN_PREFIX, BadToken
from store import logs, tables
from store.database.caller import Caller, become
from store.people import keys
from store.people.secret import digest

T = TypeVar("T")

#: The key in a request's scope under which a function is kept that looks up the credentials again, if they were looked
#: up for this request alone.
LOOK_KEY = "weft.look_again"
#: Keys seen in the last seconds, by their SHA-256 (for tokens by the key's number).
KeyCache = Remembered[Principal]


def carried_key(scope: Scope) -> str:
    """The key that a request carries; "" without one."""
    key = header(scope, b"x-api-key") or ""
    if not key:
        scheme, _, token = (header(scope, b"authorization") or "").partition(" ")
        key = token if scheme.lower() == "bearer" else ""
    return key.strip()


def presented_key(request: Request) -> str:
    """The key in the request. Raises Unauthenticated if there is none."""
    key = carried_key(request.scope)
    if not key:
        raise Unauthenticated(
            "no API key: send it in the X-API-Key header, or as Authorization: Bearer <key> (set TINKER_API_KEY)"
        )
    return key


async def principal(request: Request) -> Principal:
    """Authenticate; for `Depends`. Nothing of the request's body has been read by then."""
    return admit(request, await _authenticate(request))


async def present_principal(request: Request) -> Principal:
    """The principal as the database has it at this moment, for routes that make or end credentials: a key that was just
    revoked must not be used to make a new one in the seconds for which principals are remembered. Writes that make one
    go through `while_good`. For `Depends`."""
    return admit(request, await _authenticate(request, remembered=False))


def while_good(request: Request, who: Principal, work: Callable[[Session], T]) -> Callable[[Session], T]:
    """`work` as a write that first checks the request's credential again. The body may have come long after `who` was
    let in, and writes wait their turn: a key revoked meanwhile must make no other. Raises Unauthenticated."""
    look: Callable[[Session], Principal | None] = request.scope[LOOK_KEY]

    def written(session: Session) -> T:
        now = look(session)
        if now is None or (now.role, now.scopes, now.status) != (who.role, who.scopes, who.status):
            raise Unauthenticated("the credential of this request was revoked or changed meanwhile: nothing was done")
        return work(session)

    return written


async def key_holder(request: Request) -> Principal:
    """Authenticate by the key itself, as the database has it at this moment; a token is refused. For `Depends`."""
    secret = presented_key(request)
    if secret.startswith(TOKEN_PREFIX):
        raise Unauthenticated("this needs the API key itself, not a token that it was exchanged for")
    return admit(request, await _by_key(request, secret, remembered=False))


async def link_holder(request: Request) -> Principal:
    """Authenticate the holder of a signed link (`api.who.signing`): it may read what the key that asked for it may, as
    long as that key is good. For `Depends`."""
    key_id = service_of(request).signer.verify(request.scope["path"], request.query_params)

    def read(session: Session) -> Principal | None:
        key = session.get(tables.ApiKey, key_id)
        return principal_of(session, key) if key is not None and keys.is_good(key) else None

    found = await _look_up(request, f"link of key {key_id}", read, remembered=True)
    if found is None:
        raise LinkRefused("the API key that asked for this link is expired or revoked: ask for a new link with another")
    return admit(request, found)


def admit(request: Request, who: Principal) -> Principal:
    """From here on the request works as `who`: for row-level security, and in the audit log. Raises Forbidden for an
    organisation that is suspended or closed, RateLimited for one that has too many requests waiting."""
    if who.status in ENDED:
        what = "ask the operator of this server" if who.status == "closed" else "see its billing page or the operator"
        raise Forbidden(f"this organisation is {who.status}: {what}", code=f"organisation_{who.status}")
    check_line(who.org_id)
    if who.key_id is not None:
        service_of(request).last_used.note(who.key_id)
    address = request.client.host if request.client is not None else None
    become(Caller(who.org_id, who.actor, address, logs.about().get("request"), who.link_by))
    logs.note(org=who.org_id)
    return who


async def _authenticate(request: Request, remembered: bool = True) -> Principal:
    secret = presented_key(request)
    return await (_by_token if secret.startswith(TOKEN_PREFIX) else _by_key)(request, secret, remembered)


async def _by_key(request: Request, secret: str, remembered: bool) -> Principal:
    def read(session: Session) -> Principal | None:
        key = keys.find(session, secret)
        return principal_of(session, key, keys.secret_ends(key, secret)) if key is not None else None

    found = await _look_up(request, digest(secret), read, remembered)
    if found is None:
        raise Unauthenticated(
            "this API key is unknown or revoked, or has expired: ask an admin of your organisation for another, or the "
            "operator (weftd key create --org NAME)"
        )
    return found


async def _by_token(request: Request, token: str, remembered: bool) -> Principal:
    """The principal of a token. Its signature and expiry are checked each time; its key, like other keys, every few
    seconds."""
    try:
        claims = service_of(request).tokens.read(token)
    except BadToken as error:
        raise InvalidToken(str(error)) from None

    def read(session: Session) -> Principal | None:
        key = session.get(tables.ApiKey, claims.key_id)
        good = key is not None and keys.is_good(key) and key.org_id == claims.org_id
        return principal_of(session, key) if good else None

    found = await _look_up(request, f"key {claims.key_id} of {claims.org_id}", read, remembered)
    if found is None:
        raise InvalidToken("the API key that this token was exchanged for is expired or revoked")
    return replace(found, until=keys.earlier(found.until, claims.expires_at))


async def _look_up(
    request: Request, name: str, read: Callable[[Session], Principal | None], remembered: bool
) -> Principal | None:
    cache: KeyCache = request.app.state.keys
    if not remembered:
        request.scope[LOOK_KEY] = read
    known = cache.get(name) if remembered else None
    if known is None:
        known = await service_of(request).read(read)
        if known is not None:
            cache.put(name, known)
    return known


PrincipalDep = Annotated[Principal, Depends(principal)]
PresentPrincipalDep = Annotated[Principal, Depends(present_principal)]
KeyHolderDep = Annotated[Principal, Depends(key_holder)]
LinkHolderDep = Annotated[Principal, Depends(link_holder)]
