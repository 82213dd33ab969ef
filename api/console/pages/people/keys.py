"""API keys: made, with the secret shown once; rotated; revoked. Admins manage all, everybody else their own."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from fastapi import Form, Request, Response
from fastapi.responses import HTMLResponse
from sqlalchemy import select
from sqlalchemy.orm import Session
from weft.wire.account.organisation import ApiKeyRow

from api.console.forms import as_json
from api.console.lists import names
from api.console.render import console_router, long_page, say
from api.console.security import Viewer, ViewerDep, need_fresh
from api.http.access import declare
from api.routes.people.keys import create_key, list_keys, revoke_key, rotate_key
from api.state.service import Service, ServiceDep
from api.who.projects import visible_projects
from store.people.organisations import members
from store.people.roles import ADMIN, SCOPES
from store.tables import Project

router = console_router()


@router.get("/keys", **declare(scope="public", limit="poll"))
async def keys(request: Request, service: ServiceDep, viewer: ViewerDep) -> HTMLResponse:
    return await long_page(request, "keys.html", viewer, secret=None, **await _read(service, viewer))


@router.post("/keys", **declare(scope="public", limit="poll"))
async def make_key(
    request: Request,
    service: ServiceDep,
    viewer: ViewerDep,
    name: Annotated[str, Form(max_length=128)] = "",
    scopes: Annotated[list[str] | None, Form(max_length=len(SCOPES))] = None,
    user_id: Annotated[str, Form(max_length=64)] = "",
    project_id: Annotated[str, Form(max_length=64)] = "",
    days: Annotated[int, Form(ge=0, le=3650)] = 0,
) -> HTMLResponse:
    """The list with the new key in it, and its secret, which is shown on this page only."""
    need_fresh(request, viewer)
    expires_at = datetime.now(UTC) + timedelta(days=days) if days else None
    body = as_json(
        request, name=name, scopes=scopes or [], user_id=user_id, project_id=project_id, expires_at=expires_at
    )
    made = await create_key(body, service, viewer.who)
    return await long_page(request, "keys_list.html", viewer, secret=made, **await _read(service, viewer))


@router.post("/keys/{key_id}/rotate", **declare(scope="public", limit="poll"))
async def rotate(request: Request, service: ServiceDep, viewer: ViewerDep, key_id: str) -> HTMLResponse:
    """Another secret; the present one stays good for a day, so that nothing stops meanwhile."""
    need_fresh(request, viewer)
    made = await rotate_key(key_id, as_json(request), service, viewer.who)
    return await long_page(request, "keys_list.html", viewer, secret=made, **await _read(service, viewer))


@router.post("/keys/{key_id}/revoke", **declare(scope="public", limit="poll"))
async def revoke(service: ServiceDep, viewer: ViewerDep, key_id: str) -> Response:
    await revoke_key(key_id, service, viewer.who)
    return say("Key revoked")


async def _read(service: Service, viewer: Viewer) -> dict[str, Any]:
    found = (await list_keys(service, viewer.who)).keys
    now = datetime.now(UTC)

    def read(session: Session) -> dict[str, Any]:
        projects = select(Project).where(visible_projects(viewer.who)).filter_by(archived_at=None)
        return {
            "users": names(session, viewer.org_id, "user", {key.user_id for key in found}),
            "project_names": names(session, viewer.org_id, "project", {key.project_id for key in found}),
            "projects": list(session.scalars(projects.order_by(Project.name))),
            "members": [user for _, user in members(session, viewer.org_id)] if viewer.may(ADMIN) else [],
        }

    good = [key for key in found if _state(key, now) == "active"]
    ended = [(key, _state(key, now)) for key in found if _state(key, now) != "active"]
    return {"keys": good, "ended": ended[:50], "scopes": sorted(viewer.who.scopes), **await service.read(read)}


def _state(key: ApiKeyRow, now: datetime) -> str:
    if key.revoked_at is not None:
        return "revoked"
    return "expired" if key.expires_at is not None and key.expires_at <= now else "active"
