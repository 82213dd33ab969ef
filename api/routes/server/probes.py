"""Probes for whatever watches the processes: `/healthz` says that this process answers, `/readyz` that it can take
requests. They need no key, and tell nothing about anybody."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from fastapi import APIRouter, Response
from sqlalchemy.exc import SQLAlchemyError
from weft.wire.service import HealthResponse, StatusResponse

from api.http.access import declare
from api.state.service import Service, ServiceDep
from migrations.upgrade import head

router = APIRouter()

#: How long a database may take that is there; probes wait 5 s (deploy/).
ASKED_S = 1.0


@router.get("/health", **declare(scope="public", limit="poll", meters="nothing"))  # vLLM's name, which load tools ask
@router.get("/healthz", **declare(scope="public", limit="poll", meters="nothing"))
async def healthz() -> HealthResponse:
    """Nothing outside of this process is asked: restarting it would mend nothing there."""
    return HealthResponse()


@router.get("/readyz", **declare(scope="public", limit="poll", meters="nothing"))
async def readyz(service: ServiceDep, response: Response) -> StatusResponse:
    """503 while requests should go to another replica, and why."""
    why = "draining" if service.journal.draining else await _other_tables(service)
    response.status_code = 503 if why else 200
    return StatusResponse(status=why or "ready")


async def _other_tables(service: Service) -> str | None:
    """Why this version cannot work on the database. One that does not answer, or not soon, is away for every replica:
    while none is ready, nobody could tell clients so at the pace that suits them (`api.http.refusing`)."""
    with suppress(SQLAlchemyError, TimeoutError):
        found = await asyncio.wait_for(service.revision(), ASKED_S)
        if found != head():
            return f"the database is at migration {found}, this server needs {head()}"
    return None
