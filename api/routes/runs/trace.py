"""Exporting a session's trace: asked for with a key, fetched by a signed link without one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from weft.wire.sessions import TraceExportResponse

from api.http.access import LOOKING, declare
from api.http.auth import LinkHolderDep, PrincipalDep
from api.http.traces import trace
from api.state.service import Service, ServiceDep
from api.who.lookup import session_by_id
from api.who.principal import Principal

router = APIRouter(prefix="/api/v1/sessions")

LINK_LIFE = timedelta(hours=1)


@router.get("/{session_id}/trace_export", response_model_exclude_none=True, **declare(scope=LOOKING, limit="call"))
async def trace_export(
    session_id: str, request: Request, service: ServiceDep, who: PrincipalDep
) -> TraceExportResponse:
    """A link to the trace. It is drawn when it is fetched, so it is always ready, and as new as the fetch."""
    row = await service.read(lambda session: session_by_id(session, who, session_id))
    path = f"{router.prefix}/{row.id}/trace.pftrace"
    expires = who.reach.ends_by(datetime.now(UTC) + LINK_LIFE)
    return TraceExportResponse(status="ready", url=service.signer.link(request, path, expires, who))


@router.get("/{session_id}/trace.pftrace", response_class=StreamingResponse, **declare(scope="public", limit="call"))
async def fetch_trace(session_id: str, service: ServiceDep, who: LinkHolderDep) -> StreamingResponse:
    """The trace, for anyone who has the signed link."""
    await service.read(lambda session: session_by_id(session, who, session_id))
    headers = {
        "content-disposition": f'attachment; filename="{session_id}.pftrace"',
        "x-content-type-options": "nosniff",
    }
    return StreamingResponse(_pieces(service, who, session_id), headers=headers, media_type="application/octet-stream")


async def _pieces(service: Service, who: Principal, session_id: str) -> AsyncIterator[bytes]:
    """Drawn in the organisation's share of threads."""
    drawing = trace(service.database, session_id)
    while (piece := await service.threads.run(who.org_id, lambda: next(drawing, None))) is not None:
        yield piece
