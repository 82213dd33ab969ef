"""What Ctrl-K finds: pages, runs, checkpoints and members by name, of those that the viewer sees anyway."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import quote as url_quote

from fastapi import Query, Request
from fastapi.responses import HTMLResponse
from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from api.console.pages.runs.checkpoints import LOOKING
from api.console.render import NAVIGATION, console_router, page
from api.console.security import Viewer, ViewerDep
from api.console.titles import called, run_titles, title_of, with_owner
from api.http.access import declare
from api.state.rates import count_request, count_searches
from api.state.service import ServiceDep
from api.who.lookup import live_checkpoints, visible
from store import tables
from store.people.roles import ADMIN
from store.tables import Checkpoint, Membership, Run, User

router = console_router()

#: How many hits there are of each kind.
MOST = 6
#: How many runs whose name matches have their checkpoints searched, too.
_RUNS = 50


@dataclass(frozen=True)
class Hit:
    """`path` is a page of the console; `note` distinguishes hits of the same title."""

    kind: str
    title: str
    path: str
    note: str = ""


@router.get("/search", **declare(scope="public", limit="poll"))
async def search(
    request: Request,
    service: ServiceDep,
    viewer: ViewerDep,
    q: Annotated[str, Query(max_length=128, pattern=r"^[^\x00]*$")] = "",
) -> HTMLResponse:
    await count_request(request, viewer.who)
    await count_searches(request, viewer.who)
    text = q.strip()

    def read(session: Session) -> list[Hit]:
        hits = [*_pages(viewer, text)]
        if text:
            hits += [*_runs(session, viewer, text), *_checkpoints(session, viewer, text)]
            hits += [*_members(session, viewer, text)]
        return hits

    return page(request, "search.html", viewer, hits=await service.read(read), text=text)


def _pages(viewer: Viewer, text: str) -> Iterator[Hit]:
    links = [link for _, links in NAVIGATION for link in links if link.shown_to(viewer)]
    for link in links:
        if text.lower() in link.title.lower():
            yield Hit("Page", link.title, link.path)


def _runs(session: Session, viewer: Viewer, text: str) -> Iterator[Hit]:
    query = with_owner(select(Run).where(visible(viewer.who, Run))).where(called(text))
    for run in session.scalars(query.order_by(Run.created_at.desc(), Run.id).limit(MOST)):
        title = title_of(run, session.get_one(tables.Session, run.session_id))
        yield Hit("Run", title or run.id, f"/runs/{url_quote(run.id)}", run.id if title else run.base_model)


def _checkpoints(session: Session, viewer: Viewer, text: str) -> Iterator[Hit]:
    if not viewer.may(*LOOKING):
        return
    fitting = with_owner(select(Run).where(visible(viewer.who, Run))).where(called(text))
    runs = fitting.with_only_columns(Run.id).order_by(Run.created_at.desc(), Run.id).limit(_RUNS)
    query = select(Checkpoint).where(visible(viewer.who, Checkpoint), live_checkpoints())
    query = query.where(or_(Checkpoint.name.icontains(text, autoescape=True), Checkpoint.run_id.in_(runs)))
    rows = list(session.scalars(query.order_by(Checkpoint.created_at.desc(), Checkpoint.id).limit(MOST)))
    titles = run_titles(session, viewer.org_id, {row.run_id for row in rows})
    for row in rows:
        title = f"{row.name} of {titles[row.run_id]}"
        yield Hit("Checkpoint", title, f"/runs/{url_quote(row.run_id)}#checkpoints", f"{row.run_id}/{row.kind}")


def _members(session: Session, viewer: Viewer, text: str) -> Iterator[Hit]:
    if not viewer.may(ADMIN):
        return
    query = select(User.email, Membership.role).join(Membership, Membership.user_id == User.id)
    query = query.where(Membership.org_id == viewer.org_id, User.email.icontains(text, autoescape=True))
    for email, role in session.execute(query.order_by(User.email).limit(MOST)):
        yield Hit("Member", email, "/members", role)
