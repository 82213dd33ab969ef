"""A browser that signs in to a console by an OpenID provider over HTTP, step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import httpx

from store.people.oidc_settings import OidcSettings
from tests.console.conftest import SAME_SITE, Console
from tests.console.provider import Liar

PUBLIC = "http://localhost:8000"
SECRET = "the+secret%2Bof=the:client"  # as `openssl rand -base64` may make one, and worse
GROUPS = [
    {"group": "weft-acme", "organisation": "Acme Research", "role": "member"},
    {"group": "weft-acme-admins", "organisation": "Acme Research", "role": "admin"},
]


def take_provider(console: Console, issuer: str, **values: Any) -> OidcSettings:
    """Let this console have a provider from now on."""
    given = {"issuer": issuer, "client_id": "weft", "client_secret": SECRET, "public_url": PUBLIC, "name": "Corp"}
    oidc = OidcSettings.model_validate({**given, "groups": GROUPS, "contact": "it@corp.example", **values})
    service = console.app.state.service
    console.app.state.service = replace(service, settings=service.settings.model_copy(update={"oidc": oidc}))
    return oidc


def person(issuer: str, subject: str, **claims: Any) -> None:
    """Make the provider know a person."""
    known = {"email": f"{subject}@corp.example", "email_verified": True, **claims}
    body = {name: value for name, value in known.items() if value is not None}
    assert httpx.put(f"{issuer}/users/{subject}", json=body, verify=False).status_code == 204


def begin(console: Console, **form: Any) -> str:
    """Press the button; returns where it leads."""
    headers = {**SAME_SITE, "hx-request": "true"}
    reply = console.http.post("/console/sso", data=form, headers=headers)
    assert reply.status_code == 204, reply.text
    return str(reply.headers["hx-redirect"])


def at_provider(to: str, subject: str, **form: str) -> str:
    """Sign in at the provider; returns where it then sends the browser."""
    reply = httpx.post(to, data={"sub": subject, **form}, follow_redirects=False, verify=False)
    assert reply.status_code == 302, reply.text
    back = urlsplit(reply.headers["location"])
    assert f"{back.scheme}://{back.netloc}{back.path}" == f"{PUBLIC}/console/sso/callback"
    return f"{back.path}?{back.query}"


def come_back(console: Console, back: str) -> httpx.Response:
    headers = {"accept": "text/html", "sec-fetch-site": "cross-site"}
    reply: httpx.Response = console.http.get(back, headers=headers, follow_redirects=False)
    return reply


def sign_in(console: Console, subject: str, **form: Any) -> httpx.Response:
    """Sign in, all the way."""
    console.http.cookies.delete("weft_console")
    return come_back(console, at_provider(begin(console, **form), subject))


def lie(liar: Liar, **changed: Any) -> None:
    liar.honest()
    liar.changed = changed
