"""The list of runs, each with what it has cost so far and the last value of its curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from fastapi.responses import HTMLResponse
from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from api.console.lists import PageNumber, Text, paged
from api.console.render import console_router, page
from api.console.security import ViewerDep
from api.console.titles import called, title_of, with_owner
from api.http.access import declare
from api.state.service import ServiceDep
from api.who.lookup import visible
from billing.reports.spending import Spent, of_runs
from store import tables
from store.curves import curves_of
from store.tables import Run, RunCurve

router = console_router()

#: The most telling curves; the first of them that a run has is shown in the list.
TELLING = ("reward", "loss", "train/loss", "eval/reward", "eval/loss", "kl")


#: How many runs can be compared at a time.
MOST_COMPARED = 5
#: Clients report every ten seconds, and the database learns of it every twenty.
LOST_AFTER = timedelta(seconds=60)


@dataclass(frozen=True)
class RunLine:
    run: Run
    title: str
    state: str
    session: tables.Session
    spent: Spent
    curve: RunCurve | None


def run_lines(session: Session, org_id: str, runs: Sequence[Run]) -> list[RunLine]:
    """The lines of the list for these runs, with three queries for all of them."""
    ids = [run.id for run in runs]
    spent, curves = of_runs(session, org_id, ids), curves_of(session, org_id, ids)
    found = session.scalars(select(tables.Session).where(tables.Session.id.in_({run.session_id for run in runs})))
    owners = {row.id: row for row in found}
    return [
        RunLine(
            run,
            title_of(run, owners[run.session_id]),
            state_of(run, owners[run.session_id], datetime.now(UTC)),
            owners[run.session_id],
            spent.get(run.id, Spent()),
            _telling(curves.get(run.id, [])),
        )
        for run in runs
    ]


def state_of(run: Run, session: tables.Session, now: datetime) -> str:
    """live | lost | broken | closed. A live run is lost while nothing is heard of its client, and closed when that goes
    on (`session_idle_s`)."""
    heard = max(session.last_seen_at, run.last_request_at)
    return "lost" if run.shown_state == "live" and heard < now - LOST_AFTER else run.shown_state


def _telling(curves: list[RunCurve]) -> RunCurve | None:
    by_name = {curve.name: curve for curve in curves}
    return next((by_name[name] for name in TELLING if name in by_name), curves[0] if curves else None)


@router.get("/runs", **declare(scope="public", limit="poll"))
async def runs(
    request: Request,
    service: ServiceDep,
    viewer: ViewerDep,
    page_number: Annotated[PageNumber, Query(alias="page")] = 1,
    state: Literal["", "live", "closed"] = "",
    search: Text = "",
) -> HTMLResponse:
    query = {"state": state, "search": search.strip()}

    def read(session: Session) -> dict[str, Any]:
        wanted = select(Run).where(visible(viewer.who, Run)).order_by(Run.created_at.desc(), Run.id)
        if state:
            wanted = wanted.where(Run.state == state)
        if query["search"]:
            text = query["search"]
            wanted = with_owner(wanted).where(or_(called(text), Run.base_model.icontains(text, autoescape=True)))
        rows, pages = paged(session, wanted, page_number)
        return {
            "runs": run_lines(session, viewer.org_id, rows),
            "pages": pages,
            "query": query,
            "most_compared": MOST_COMPARED,
        }

    template = "runs_table.html" if request.headers.get("hx-target") == "runs" else "runs.html"
    return page(request, template, viewer, **await service.read(read))
