"""What stands between a browser and a page: the cookie, the CSRF token, the headers.

A page needs a good session cookie. A request that changes something must also carry the session's CSRF token in a
header, which no other site can read or send; and the browser must not mark it as coming from another site.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated
from urllib.parse import SplitResult, quote as url_quote, urlsplit

from fastapi import Depends, Request
from fastapi.responses import RedirectResponse, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.console import sessions
from api.errors import Forbidden, TooLarge, Unauthenticated
from api.http.auth import LOOK_KEY, admit
from api.state.service import service_of
from api.who.principal import Principal
from store.database.caller import Caller, become
from store.people.secret import derive

PREFIX = "/console"
CSRF_HEADER = "x-csrf-token"
SAFE_METHODS = frozenset({"GET", "HEAD"})
MAX_FORM_BYTES = 65_536

#: Nothing inline and nothing from elsewhere; forms may lead to Stripe's checkout.
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self' https://checkout.stripe.com; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


class SignInNeeded(Unauthenticated):
    """No good session. A page leads to the sign-in page; a part of one has htmx go there."""

    def __init__(self, request: Request, fresh: bool = False) -> None:
        super().__init__("not signed in, or no longer: sign in again")
        self._to = f"{PREFIX}/login?next={url_quote(_here(request), safe='')}" + ("&fresh=1" if fresh else "")
        self._part = "hx-request" in request.headers
        self._page = request.method in SAFE_METHODS and "text/html" in request.headers.get("accept", "")

    def response(self) -> Response:
        if self._part:
            return Response(self.detail, 401, {"hx-redirect": self._to})
        return RedirectResponse(self._to, 303) if self._page else super().response()


@dataclass(frozen=True)
class Viewer:
    """The person who looks at a page, and what they may do."""

    who: Principal
    org_name: str
    name: str
    operator: bool
    csrf: str
    since: datetime
    by_provider: bool = False

    @property
    def org_id(self) -> str:
        return self.who.org_id

    def may(self, *scopes: str) -> bool:
        """Whether the viewer has one of `scopes`."""
        return any(scope in self.who.scopes for scope in scopes)

    def need(self, *scopes: str) -> None:
        if not self.may(*scopes):
            raise Forbidden(
                f"this needs {' or '.join(scopes)}, which the role {self.who.role} does not have: ask an admin"
            )


def need_fresh(request: Request, viewer: Viewer) -> None:
    """Refuse a session whose sign-in is too old. The most harmful actions call this, in case somebody else sits at an
    open browser."""
    if datetime.now(UTC) - viewer.since > sessions.FRESH:
        raise SignInNeeded(request, fresh=True)


async def viewer(request: Request) -> Viewer:
    """The viewer of a page, or who presses a button on one; for `Depends`."""
    sid = request.cookies.get(cookie_name(request), "")
    now = datetime.now(UTC)
    service = service_of(request)
    oidc = service.settings.oidc
    found = await service.read(lambda session: sessions.signed_in(session, sid, now, oidc)) if sid else None
    if found is None:
        raise SignInNeeded(request)
    token = csrf_token(service.secret, sid)
    if request.method not in SAFE_METHODS:
        check_same_site(request)
        if not hmac.compare_digest(request.headers.get(CSRF_HEADER, "").encode(), token.encode()):
            raise Forbidden("the CSRF token is missing or not of this session: load the page again")
    request.scope[LOOK_KEY] = lambda session: _who(sessions.signed_in(session, sid, datetime.now(UTC), oidc))
    if found.stale:
        await service.database.write(lambda session: sessions.note_use(session, sid, now))
    who = found.who
    if who.status != "suspended" or not request.scope["path"].startswith(f"{PREFIX}/billing"):
        admit(request, who)  # admitted: a suspended organisation may see its bills, so that it can pay them
    else:
        address = request.client.host if request.client else None
        become(Caller(who.org_id, who.actor, address, link_by=who.link_by))
    return Viewer(who, found.org_name, found.name, found.operator, token, found.since, found.by_provider)


def _who(found: sessions.SignedIn | None) -> Principal | None:
    return found.who if found is not None else None


ViewerDep = Annotated[Viewer, Depends(viewer)]


def check_same_site(request: Request) -> None:
    """Refuse a request that the browser marks as coming from another site."""
    site = request.headers.get("sec-fetch-site")
    if site is None:
        origin = request.headers.get("origin")
        if origin is None or (_split(origin).netloc or None) == request.headers.get("host"):
            return
        site = "cross-site"
    if site not in ("same-origin", "none"):
        raise Forbidden(f"a {site} request: this can only be done from the console's own pages")


def csrf_token(secret: bytes, sid: str) -> str:
    """The token of a session: known to its pages only, and kept nowhere."""
    return hmac.new(derive(secret, "console csrf"), sid.encode(), hashlib.sha256).hexdigest()


def cookie_name(request: Request) -> str:
    """The cookie's name. Under https it has a prefix with which browsers refuse it if another host sets it, or if it
    lacks Secure."""
    return "__Host-weft_console" if request.url.scheme == "https" else "weft_console"


def give_cookie(request: Request, response: Response, sid: str) -> None:
    set_cookie(request, response, cookie_name(request), sid, int(sessions.ABSOLUTE.total_seconds()))


def set_cookie(request: Request, response: Response, name: str, value: str, max_age_s: int) -> None:
    """Set a cookie that only this server gets, and that no script can read."""
    secure = request.url.scheme == "https"
    response.set_cookie(name, value, max_age_s, path="/", secure=secure, httponly=True, samesite="lax")


def take_cookie(request: Request, response: Response, name: str) -> None:
    secure = request.url.scheme == "https"
    response.delete_cookie(name, path="/", secure=secure, httponly=True, samesite="lax")


def _split(url: str) -> SplitResult:
    """The parts of a URL; empty parts if it is none."""
    try:
        return urlsplit(url)
    except ValueError:
        return SplitResult("", "", "", "", "")


def local_path(value: str) -> str:
    """The path to go to after signing in: `value` if it is a page of the console, else the first page; never another
    site."""
    path = _split(value)
    good = value.startswith(PREFIX + "/") and not path.netloc and not path.scheme and "\\" not in value
    return value if good and value.isprintable() else PREFIX + "/"


def _here(request: Request) -> str:
    if request.method not in SAFE_METHODS or "hx-request" in request.headers:
        page = _split(request.headers.get("hx-current-url", PREFIX + "/"))
        path, query = page.path, page.query
    else:
        path, query = request.scope["path"], request.url.query
    return path + (f"?{query}" if query else "")


class SecurityHeaders:
    """Adds HEADERS to every answer of the console, and refuses bodies larger than any of its forms."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _of_console(scope):
            await self.app(scope, receive, send)
            return

        async def add(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        if _body_bytes(scope) > MAX_FORM_BYTES:
            await TooLarge(f"a form of the console has at most {MAX_FORM_BYTES} bytes").response()(scope, receive, add)
            return
        await self.app(scope, receive, add)


def _body_bytes(scope: Scope) -> int:
    """The declared size of the body; a body without one counts as too large. It is checked first, since anybody can
    send one without signing in."""
    headers = Headers(scope=scope)
    if "transfer-encoding" in headers:
        return MAX_FORM_BYTES + 1
    declared = headers.get("content-length", "0")
    return int(declared) if declared.isdecimal() else MAX_FORM_BYTES + 1


def _of_console(scope: Scope) -> bool:
    path: str = scope["path"]
    return path == PREFIX or path.startswith(PREFIX + "/")
