"""One run: its curves against step, tokens or cost, and what it has cost so far, while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import Form, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from sqlalchemy import func, select
from sqlalchemy.orm import Session
from weft.money import usd

from api.console.formats import usd_text
from api.console.hyperparameters import hyperparameters
from api.console.lists import names
from api.console.pages.runs.listing import run_lines, state_of
from api.console.render import console_router, page, say
from api.console.security import Viewer, ViewerDep
from api.console.titles import checkpoint_title, run_titles, title_of
from api.errors import Forbidden, Invalid, NotFound
from api.http.access import declare
from api.paths import parse_path
from api.routes.runs.metrics import run_metrics
from api.routes.runs.notes import change_notes
from api.routes.stored.weights import CONTINUED_FROM
from api.state.service import ServiceDep
from api.who.lookup import live_checkpoints, run_by_id
from api.who.may_change import own_run
from billing.metering import usage
from store import tables
from store.tables import Checkpoint, Operation
from store.tables.work import MAX_NOTES

router = console_router()

RECENT = 8
#: How many points a curve has; its chart has some 600 pixels, and an open page asks every few seconds.
DRAWN = 500


@router.get("/runs/{run_id}", **declare(scope="public", limit="poll"))
async def run_page(request: Request, service: ServiceDep, viewer: ViewerDep, run_id: str) -> HTMLResponse:
    def read(session: Session) -> dict[str, Any]:
        run = run_by_id(session, viewer.who, run_id)
        owner = session.get_one(tables.Session, run.session_id)
        saved = select(Checkpoint).filter_by(org_id=viewer.org_id, run_id=run_id).where(live_checkpoints())
        failed = select(Operation).filter_by(org_id=viewer.org_id, lane=run_id, state="failed")
        return {
            "run": run,
            "title": title_of(run, owner),
            "continued": _continued(session, viewer, run),
            "hyperparameters": hyperparameters(session, run),
            "may_write": viewer.may("train") and _is_own(session, viewer, run_id),
            "longest_notes": MAX_NOTES,
            "state_name": state_of(run, owner, datetime.now(UTC)),
            "session": owner,
            "project": names(session, viewer.org_id, "project", [owner.project_id])[owner.project_id],
            "checkpoints": list(session.scalars(saved.order_by(Checkpoint.created_at.desc()).limit(100))),
            "failures": list(session.scalars(failed.order_by(Operation.accepted_at.desc()).limit(RECENT))),
            **_spent(session, viewer.org_id, run_id),
        }

    return page(request, "run.html", viewer, **await service.read(read))


@router.post("/runs/{run_id}/notes", **declare(scope="public", limit="poll"))
async def set_notes(
    service: ServiceDep,
    viewer: ViewerDep,
    run_id: str,
    notes: Annotated[str, Form(max_length=2 * MAX_NOTES)] = "",
) -> Response:
    viewer.need("train")
    await change_notes(service, viewer.who, run_id, notes.replace("\r\n", "\n"))
    return say("Notes kept")


def _is_own(session: Session, viewer: Viewer, run_id: str) -> bool:
    try:
        own_run(session, viewer.who, run_id)
    except Forbidden:
        return False
    return True


@dataclass(frozen=True)
class Continued:
    """The checkpoint that a run was started from: `run_id` is None if the viewer may not see its run."""

    path: str
    title: str
    run_id: str | None = None


def _continued(session: Session, viewer: Viewer, run: tables.Run) -> Continued | None:
    path = run.user_metadata.get(CONTINUED_FROM)
    if path is None:
        return None
    try:
        run_id = run_by_id(session, viewer.who, parse_path(str(path), CONTINUED_FROM).run_id).id
    except (Invalid, NotFound):
        return Continued(str(path), str(path))
    return Continued(str(path), checkpoint_title(str(path), run_titles(session, viewer.org_id, [run_id])), run_id)


@router.get("/runs/{run_id}/live", **declare(scope="public", limit="poll"))
async def run_live(request: Request, service: ServiceDep, viewer: ViewerDep, run_id: str) -> JSONResponse:
    """The changing part of the page: the API's own curves, and what the run has cost so far."""
    curves = await run_metrics(run_id, request, service, viewer.who, None, DRAWN)

    def read(session: Session) -> dict[str, Any]:
        run = run_by_id(session, viewer.who, run_id)
        (line,) = run_lines(session, viewer.org_id, [run])
        steps = _operations(session, run_id).get("optim_step", 0)
        return {
            "state": line.state,
            "cost_usd": usd(line.spent.amount_nusd),
            "cost_text": usd_text(line.spent.amount_nusd),
            "tokens": line.spent.tokens,
            "optim_steps": steps,
        }

    return JSONResponse({**curves.model_dump(), **await service.read(read)})


def _spent(session: Session, org_id: str, run_id: str) -> dict[str, Any]:
    rows = usage.summary(session, org_id, run_id)
    return {
        "kinds": rows,
        "total_nusd": sum(row.amount_nusd for row in rows),
        "operations": _operations(session, run_id),
    }


def _operations(session: Session, run_id: str) -> dict[str, int]:
    """How many operations of each kind were done."""
    query = select(Operation.kind, func.count()).filter_by(lane=run_id, state="done").group_by(Operation.kind)
    return {kind: number for kind, number in session.execute(query)}
