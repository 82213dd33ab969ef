"""Who may no longer: without a key, with one that is revoked, expired or rotated away, of a member who left, of an
organisation that is suspended or closed. Made from the table of routes, those that are called before FastAPI looks
(`api.http.direct`) with the others: every route refuses each of them before it does anything."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from api.console import sessions
from api.console.security import csrf_token
from api.server.app import front
from store import tables
from store.people import organisations
from store.people.keys import revoke_row
from store.people.oidc_settings import OidcSettings
from tests.api.conftest import World
from tests.tenancy.conftest import forget_keys, member, routes_of
from tests.tenancy.test_cross_tenant import Ids, things

ROUTES = routes_of(front())
#: Links are good for one file of what `things` makes.
LINKED: dict[str, tuple[str, Callable[[Any], str]]] = {
    "GET /api/v1/downloads/{checkpoint_id}/files/{name:path}": (
        "training_runs/{run_id}/checkpoints/external_weights/exported/external_weights_urls",
        lambda reply: reply.json()["urls"]["adapter_model.safetensors"],
    ),
    "GET /api/v1/downloads/{checkpoint_id}/checkpoint.tar": (
        "training_runs/{run_id}/checkpoints/weights/packed/archive",
        lambda reply: reply.headers["location"],
    ),
    "GET /api/v1/sessions/{session_id}/trace.pftrace": (
        "sessions/{session_id}/trace_export",
        lambda reply: reply.json()["url"],
    ),
}
#: Routes of the console that are there for anybody. Those that are entered by a secret: tests/console.
DOORS = {
    "GET /console",
    "GET /console/static/{name:path}",
    "GET /console/login",
    "POST /console/login",
    "GET /console/login/{token}",
    "POST /console/login/{token}",
    "GET /console/join/{secret}",
    "POST /console/join/{secret}",
    "POST /console/sso",
    "GET /console/sso/callback",
}


@dataclass(frozen=True)
class Ended:
    """A way to end a key, and the status and code that are answered afterwards; the same for its console session."""

    end: Callable[[Session, tables.ApiKey], object]
    status: int
    code: str
    #: Bills are still shown to the organisation that has to pay them.
    sees_bills: bool = False


def _expire(_session: Session, key: tables.ApiKey) -> None:
    key.expires_at = datetime.now(UTC) - timedelta(seconds=1)


def _leave(session: Session, key: tables.ApiKey) -> None:
    organisations.remove_member(session, key.org_id, str(key.user_id))


def _become(status: str) -> Callable[[Session, tables.ApiKey], object]:
    return lambda session, key: organisations.set_status(
        session, session.get_one(tables.Organisation, key.org_id), status
    )


ENDED = {
    "revoked": Ended(revoke_row, 401, "unauthenticated"),
    "expired": Ended(_expire, 401, "unauthenticated"),
    "left": Ended(_leave, 401, "unauthenticated"),
    "suspended": Ended(_become("suspended"), 403, "organisation_suspended", sees_bills=True),
    "closed": Ended(_become("closed"), 403, "organisation_closed"),
}


@dataclass(frozen=True)
class Held:
    """Everything that stands for one key, and what it has made."""

    ids: Ids
    key: str
    token: str
    cookie: str
    links: dict[str, str]


@pytest.fixture
def held(world: World) -> Held:
    ids = things(world)
    packed = world.checkpoint(ids["run_id"], 3, "packed")
    with world.database.read() as session:
        ref = session.scalars(select(tables.Checkpoint.ref).filter_by(name="packed")).one()
    with world.service.blobs.new_folder(ref) as folder:
        (folder / "adapter_config.json").write_text("{}")
    assert packed.endswith("packed")
    _, key = member(world, "owner", "ada@example.com")
    token = world.post("auth/token", {}, key=key)["jwt"]
    now = datetime.now(UTC)
    cookie = world.database.write_now(lambda session: sessions.sign_in_with_key(session, key, "", now, OidcSettings()))
    links = {}
    for route, (path, found) in LINKED.items():
        reply = world.call("GET", path.format(**ids), key=key, follow_redirects=False)
        url = urlsplit(found(reply))
        links[route] = f"{url.path}?{url.query}"
    return Held(ids, key, token, str(cookie), links)


def everything(world: World) -> list[int]:
    """The number of rows in each table but the audit log."""
    with world.database.read() as session:
        found = [table for name, table in sorted(tables.Base.metadata.tables.items()) if name != "audit_log"]
        return [session.scalar(select(func.count()).select_from(table)) or 0 for table in found]


def asked(world: World, held: Held, route: str, headers: dict[str, str]) -> Any:
    method, _, path = route.partition(" ")
    path = re.sub(r"{(\w+)(:path)?}", lambda match: held.ids.get(match.group(1), "0"), path)
    return world.http.request(method, path, headers=headers, json={}, follow_redirects=False)


def by_key(world: World, held: Held, headers: dict[str, str]) -> dict[str, tuple[int, str]]:
    """The answers of all routes that want a key to these headers."""
    found = {}
    for route in ROUTES:
        if route.access is not None and not route.access.public:
            reply = asked(world, held, str(route), headers)
            said = reply.json() if reply.content else {"code": found[f"GET {route.path}"][1]}  # HEAD
            found[str(route)] = (reply.status_code, said.get("code") or said["error"]["code"])
    assert len(found) > 80
    return found


def test_without_a_key(world: World, held: Held) -> None:
    before = everything(world)
    for headers in ({"x-api-key": "tml-nobody"}, {"cookie": f"weft_console={held.cookie}"}):
        assert set(by_key(world, held, headers).values()) == {(401, "unauthenticated")}, headers
    assert everything(world) == before


@pytest.mark.parametrize("name", ENDED)
def test_every_route(world: World, held: Held, name: str) -> None:
    ended = ENDED[name]
    for route, link in held.links.items():
        assert world.http.get(link).status_code == 200, route
    csrf = {"x-csrf-token": csrf_token(world.service.secret, held.cookie), "cookie": f"weft_console={held.cookie}"}
    assert asked(world, held, "GET /console/keys", csrf).status_code == 200
    lent = {"source_path": held.ids["path"], "destination_project_id": "default", "weights_access_token": held.key}
    world.post("copy_weights", lent, key=world.other_key)

    def end(session: Session) -> None:
        key = session.scalars(
            select(tables.ApiKey).where(tables.ApiKey.user_id.is_not(None)).order_by(tables.ApiKey.id.desc())
        ).first()
        assert key is not None
        ended.end(session, key)

    world.database.write_now(end)
    forget_keys(world)
    before = everything(world)
    assert set(by_key(world, held, {"x-api-key": held.key}).values()) == {(ended.status, ended.code)}
    answers = set(by_key(world, held, {"authorization": f"Bearer {held.token}"}).values())
    assert answers == {(ended.status, "invalid_token" if ended.status == 401 else ended.code)}
    for route, link in held.links.items():
        reply = world.http.get(link)
        assert (reply.status_code, reply.json()["code"]) == (
            403,
            "link_refused" if ended.status == 401 else ended.code,
        ), route
    pages = [str(route) for route in ROUTES if route.path.startswith("/console") and str(route) not in DOORS]
    assert len(pages) > 30
    for page in pages:
        if not (ended.sees_bills and "/console/billing" in page):
            assert asked(world, held, page, csrf).status_code in (401, 403), page
    world.post("copy_weights", lent, key=world.other_key, status=400)
    assert everything(world) == before
