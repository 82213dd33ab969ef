"""How a run's loop is doing, and what it waits for."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Query
from sqlalchemy.orm import Session
from weft.wire.health import RunHealthResponse, StallReport

from api.http.access import LOOKING, declare
from api.http.auth import PrincipalDep
from api.state.service import ServiceDep
from api.who.lookup import run_by_id
from scheduler.order.operations import Waiting
from scheduler.reports.health import Health, health_of

router = APIRouter(prefix="/api/v1/weft")


@router.get("/runs/{run_id}/health", **declare(scope=LOOKING, limit="call", meters="nothing"))
async def run_health(
    run_id: str, service: ServiceDep, who: PrincipalDep, window_s: Annotated[float, Query(ge=1, le=86_400)] = 3600
) -> RunHealthResponse:
    """The run's last `window_s` seconds."""

    def read(session: Session) -> tuple[Health, str | None]:
        run = run_by_id(session, who, run_id)
        return health_of(session, run, datetime.now(UTC), timedelta(seconds=window_s)), run.broken

    health, broken = await service.read(read)
    stall, reason = health.stall, ""
    if stall.oldest_request_id is not None:
        waiting = await service.journal.outcome(who.org_id, stall.oldest_request_id, 0)
        reason = waiting.reason if isinstance(waiting, Waiting) else ""
    generator = service.stats().get("generator", {})
    offered = generator.get("slots_offered", 0)
    facts = asdict(health)
    facts["stall"] = StallReport(**facts["stall"], reason=broken or reason, sentence=broken or stall.sentence(reason))
    occupancy = generator.get("slots_busy", 0) / offered if offered else 0.0
    return RunHealthResponse(run_id=run_id, generator_occupancy=occupancy, **facts)
