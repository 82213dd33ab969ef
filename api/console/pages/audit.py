"""Who did what to what, newest first, and whether the chain of entries is whole."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from api.console.lists import PageNumber, names, paged
from api.console.render import ConsoleRoute, page
from api.console.security import ViewerDep
from api.http.access import declare
from api.state.service import ServiceDep
from store.audit import GROUPS
from store.tables import AuditEntry

router = APIRouter(route_class=ConsoleRoute)

Group = Literal["all", "checkpoints", "projects", "teams", "organizations"]


@router.get("/audit", **declare(scope="public", limit="poll"))
async def audit(
    request: Request,
    service: ServiceDep,
    viewer: ViewerDep,
    page_number: Annotated[PageNumber, Query(alias="page")] = 1,
    group: Group = "all",
) -> HTMLResponse:
    viewer.need("admin")

    def read(session: Session) -> dict[str, Any]:
        begins = (AuditEntry.event.startswith(prefix, autoescape=True) for prefix in GROUPS[group])
        query = select(AuditEntry).where(AuditEntry.org_id == viewer.org_id, or_(*begins))
        entries, pages = paged(session, query.order_by(AuditEntry.at.desc(), AuditEntry.id.desc()), page_number)
        return {
            "entries": [
                (entry, _actor(session, viewer.org_id, entry.actor), json.dumps(entry.detail)) for entry in entries
            ],
            "pages": pages,
            "query": {"group": "" if group == "all" else group},
            "group": group,
            "groups": list(GROUPS),
        }

    return page(request, "audit.html", viewer, **await service.read(read))


def _actor(session: Session, org_id: str, actor: str) -> str:
    kind, _, who = actor.partition(":")
    if kind == "user":
        return names(session, org_id, "user", [who])[who]
    return f"key {names(session, org_id, 'key', [who])[who]}" if kind == "key" else actor
