"""What each server process does on its own, now and then: write down who is alive and who has which results, end
idle sessions, forget old telemetry. What concerns the database alone is a job (`scheduler.jobs`)."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime, timedelta

from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from api.state.liveness import end_idle, runs_over
from api.state.service import Service

log = logging.getLogger(__name__)

#: Longest time between two rounds, and so between a sign of life and its row.
ROUND_S = 20.0
#: After a start, clients have this long to be heard of again before silence counts.
GRACE_S = 120.0


async def keep_house(service: Service) -> None:
    """Rounds for as long as the server runs; cancelled at its end."""
    idle_s = service.settings.session_idle_s
    started = asyncio.get_running_loop().time()
    while True:
        await asyncio.sleep(min(ROUND_S, idle_s / 4))
        try:
            await service.liveness.flush()
            await service.last_used.flush()
            await service.fetched.flush()
            if asyncio.get_running_loop().time() - started > min(GRACE_S, idle_s):
                await reap(service)
            await run_in_threadpool(service.telemetry.forget_old)
        except Exception:
            log.exception("a round of housekeeping failed; the next one tries again")


async def reap(service: Service, now: datetime | None = None) -> list[str]:
    """End the sessions that are idle for too long, and close the runs of all that have ended. Checkpoints stay."""
    before = (now or datetime.now(UTC)) - timedelta(seconds=service.settings.session_idle_s)
    working = service.journal.working_sessions()

    def write(session: Session) -> tuple[list[str], list[str]]:
        ended = end_idle(session, before, working)
        return ended, runs_over(session)

    ended, runs = await service.database.write(write)
    service.liveness.ended(ended)
    for run_id in runs:
        service.journal.close_run(run_id)
    if ended:
        log.info("ended %d idle sessions", len(ended))
    return ended
