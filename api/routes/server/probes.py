"""Probes for whatever watches the processes: `/healthz` says that this process answers, `/readyz` that it can take
requests. They need no key, and tell nothing about anybody."""

from __future__ import annotations

from fastapi import APIRouter, Response
from sqlalchemy.exc import SQLAlchemyError
from weft.wire.service import HealthResponse, StatusResponse

from api.http.access import declare
from api.state.service import Service, ServiceDep
from migrations.upgrade import head

router = APIRouter()


@router.get("/health", **declare(scope="public", limit="poll", meters="nothing"))  # vLLM's name, which load tools ask
@router.get("/healthz", **declare(scope="public", limit="poll", meters="nothing"))
async def healthz() -> HealthResponse:
    """Nothing outside of this process is asked: restarting it would mend nothing there."""
    return HealthResponse()


@router.get("/readyz", **declare(scope="public", limit="poll", meters="nothing"))
async def readyz(service: ServiceDep, response: Response) -> StatusResponse:
    """503 while requests should go to another replica, and why."""
    why = "draining" if service.journal.draining else await _database_says(service)
    response.status_code = 503 if why else 200
    return StatusResponse(status=why or "ready")


async def _database_says(service: Service) -> str | None:
    try:
        found = await service.revision()
    except (SQLAlchemyError, TimeoutError):
        return "the database does not answer"
    return None if found == head() else f"the database is at migration {found}, this server needs {head()}"
