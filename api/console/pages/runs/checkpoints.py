"""Stored weights: what there is, whose, how large, until when; and the buttons that end it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import Form, Query, Request, Response
from fastapi.responses import HTMLResponse
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from api.console.lists import PageNumber, Text, names, paged
from api.console.render import console_router, page, say
from api.console.security import ViewerDep
from api.console.titles import called, run_titles, with_owner
from api.http.access import declare
from api.paths import parse_path
from api.routes.stored.checkpoints import delete_checkpoint, expire
from api.state.service import ServiceDep
from api.who.lookup import live_checkpoints, visible
from api.who.principal import Principal
from store import tables
from store.tables import Checkpoint, Run

router = console_router()

LOOKING = ("checkpoints:read", "train", "sample")
Sort = Literal["newest", "largest", "expiring"]
ORDERS: dict[Sort, tuple[Any, ...]] = {
    "newest": (Checkpoint.created_at.desc(), Checkpoint.id),
    "largest": (Checkpoint.size_bytes.desc(), Checkpoint.id),
    "expiring": (Checkpoint.expires_at.is_(None), Checkpoint.expires_at, Checkpoint.id),
}
#: The lives that the button offers for a checkpoint, in days; 0 is for ever.
LIVES = ((1, "1 day"), (7, "1 week"), (30, "30 days"), (365, "1 year"), (0, "never"))


@dataclass(frozen=True)
class Stored:
    """The checkpoints and bytes that one owner stores."""

    name: str
    count: int
    size_bytes: int


@router.get("/checkpoints", **declare(scope="public", limit="poll"))
async def checkpoints(
    request: Request,
    service: ServiceDep,
    viewer: ViewerDep,
    page_number: Annotated[PageNumber, Query(alias="page")] = 1,
    sort: Sort = "newest",
    search: Text = "",
) -> HTMLResponse:
    viewer.need(*LOOKING)
    query = {"sort": sort, "search": search.strip()}

    def read(session: Session) -> dict[str, Any]:
        live = select(Checkpoint).where(visible(viewer.who, Checkpoint), live_checkpoints())
        found = live.order_by(*ORDERS[sort])
        if query["search"]:
            text = query["search"]
            runs = with_owner(select(Run).where(visible(viewer.who, Run))).where(called(text)).with_only_columns(Run.id)
            found = found.where(Checkpoint.name.icontains(text, autoescape=True) | Checkpoint.run_id.in_(runs))
        rows, pages = paged(session, found, page_number)
        owners = _by_project(session, viewer.who)
        return {
            "checkpoints": rows,
            "titles": run_titles(session, viewer.org_id, {row.run_id for row in rows}),
            "pages": pages,
            "query": query,
            "owners": owners,
            "stored": Stored("", sum(o.count for o in owners), sum(o.size_bytes for o in owners)),
            "lives": LIVES,
        }

    return page(request, "checkpoints.html", viewer, **await service.read(read))


@router.post("/checkpoints/ttl", **declare(scope="public", limit="poll"))
async def set_ttl(
    service: ServiceDep,
    viewer: ViewerDep,
    path: Annotated[str, Form(max_length=512)],
    days: Annotated[int, Form(ge=0, le=3650)],
) -> Response:
    viewer.need("checkpoints:write")
    await expire(service, viewer.who, parse_path(path, "path"), days * 86_400 or None)
    return say("Expiry changed")


@router.post("/checkpoints/delete", **declare(scope="public", limit="poll"))
async def delete(service: ServiceDep, viewer: ViewerDep, path: Annotated[str, Form(max_length=512)]) -> Response:
    viewer.need("checkpoints:write")
    parsed = parse_path(path, "path")
    await delete_checkpoint(parsed.run_id, parsed.kind, parsed.name, service, viewer.who)
    return say("Checkpoint deleted")


def _by_project(session: Session, who: Principal) -> list[Stored]:
    owner = tables.Session
    query = select(owner.project_id, func.count(), func.sum(Checkpoint.size_bytes)).select_from(Checkpoint)
    query = query.join(Run, Run.id == Checkpoint.run_id).join(owner, owner.id == Run.session_id)
    rows = session.execute(query.where(visible(who, Checkpoint), live_checkpoints()).group_by(owner.project_id)).all()
    called = names(session, who.org_id, "project", [project for project, _, _ in rows])
    found = [Stored(called[project], number, int(size or 0)) for project, number, size in rows]
    return sorted(found, key=lambda stored: -stored.size_bytes)
