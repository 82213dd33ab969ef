"""What people write about a run: a text of its own, beside the metadata that its client gave it."""

from __future__ import annotations

from fastapi import APIRouter, Request
from sqlalchemy.orm import Session
from weft.wire import RunNotes, SetNotesRequest

from api.checks.runs import check_text
from api.http.access import LOOKING, declare
from api.http.auth import PrincipalDep
from api.http.bodies import read_json
from api.state.service import Service, ServiceDep
from api.who.lookup import run_by_id
from api.who.may_change import own_run
from api.who.principal import Principal
from store.database import audit
from store.tables.work import MAX_NOTES

router = APIRouter(prefix="/api/v1/weft")


@router.get("/runs/{run_id}/notes", **declare(scope=LOOKING, limit="call"))
async def run_notes(run_id: str, service: ServiceDep, who: PrincipalDep) -> RunNotes:
    """What was written about a run; empty if nothing was."""
    return await service.read(lambda session: RunNotes(notes=run_by_id(session, who, run_id).notes or ""))


@router.put("/runs/{run_id}/notes", **declare(scope="train", limit="call"))
async def set_run_notes(run_id: str, request: Request, service: ServiceDep, who: PrincipalDep) -> RunNotes:
    """Write about a run of one's own, in place of what was written before."""
    body = await read_json(request, SetNotesRequest)
    return RunNotes(notes=await change_notes(service, who, run_id, body.notes))


async def change_notes(service: Service, who: Principal, run_id: str, text: str) -> str:
    """`set_run_notes`, for the API and the console. Returns the notes as they are kept."""
    notes = (check_text(text, "notes", MAX_NOTES) or "").strip()

    def write(session: Session) -> None:
        run = own_run(session, who, run_id)
        if (run.notes or "") == notes:
            return
        run.notes = notes or None
        detail = {"characters": len(notes)}
        audit.record(session, org_id=who.org_id, key_id=who.key_id, event="run_notes_set", target=run.id, detail=detail)

    await service.database.write(write)
    return notes
