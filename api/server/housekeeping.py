"""What each server process does on its own, now and then: write down who is alive and who has which results, end
idle sessions, forget old telemetry. What concerns the database alone is a job (`scheduler.jobs`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from api.state.liveness import end_idle
from api.state.service import Service
from scheduler.journal.front import WORK_WAITS
from scheduler.journal.left import open_runs, waiting_samples
from scheduler.order.operations import Waiting
from store.database.clock import clock as time_of
from store.database.leaps import settles_at

log = logging.getLogger(__name__)

#: The longest time between two rounds; a sign of life is written this late.
ROUND_S = 20.0
#: How long clients have to report again after a start, or after a time in which they could not be heard, before their
#: silence counts.
GRACE_S = 120.0


class Silence:
    """Decides whether the silence of clients may end their sessions: only once this process has been able to hear
    clients for a while. It cannot hear them before its start, nor while the machine sleeps or the process is stopped
    (which looks like a clock that was set)."""

    def __init__(self, idle_s: float, now: datetime) -> None:
        self._idle, self._grace = timedelta(seconds=idle_s), timedelta(seconds=min(GRACE_S, idle_s))
        self._since = self._looked = now

    def counts(self, now: datetime) -> bool:
        """True if silence may end sessions now. Must be called in each round, to notice rounds that came late."""
        if not timedelta() <= now - self._looked <= self._idle / 2:
            self._since = now
        self._looked = now
        return now - self._since > self._grace


async def keep_house(service: Service, clock: Callable[[], datetime] | None = None) -> None:
    """At least every ROUND_S: write what memory has noted (signs of life, uses of keys, fetched results) to the
    database, end idle sessions (`reap`), and delete old telemetry. Runs until it is cancelled at the server's end.
    Tests pass a `clock` of their own."""
    idle_s = service.settings.session_idle_s
    own = clock or (lambda: datetime.now(UTC))
    silence = Silence(idle_s, own())
    while True:
        await asyncio.sleep(min(ROUND_S, idle_s / 4))
        try:
            await write_noted(service)
            if silence.counts(now := own()):
                await reap(service, now if clock is not None else None)
            await run_in_threadpool(service.telemetry.forget_old)
        except Exception:
            log.exception("a round of housekeeping failed; the next one tries again")


async def write_noted(service: Service) -> None:
    """Write what memory has noted to the database."""
    await service.liveness.flush()
    await service.last_used.flush()
    await service.fetched.flush()


async def reap(service: Service, now: datetime | None = None) -> list[str]:
    """End sessions that have been idle for too long, by the database's time unless `now` is given; none while that time
    is not believed. Then close the runs of ended sessions, and cancel samples that still wait for a missing model.
    Checkpoints stay."""
    idle = timedelta(seconds=service.settings.session_idle_s)
    working = await service.journal.working_sessions()

    def left(session: Session) -> tuple[list[str], list[tuple[str, str]]]:
        return open_runs(session), waiting_samples(session, (now or time_of(session)) - WORK_WAITS)

    def end(session: Session) -> list[str]:
        there = now or time_of(session)
        return end_idle(session, there - idle, working) if settles_at(session, there) is None else []

    ended = await service.database.write(end)
    service.liveness.ended(ended)
    if ended:
        log.info("ended %d idle sessions", len(ended))
    runs, samples = await service.read(left)
    for run_id in runs:
        service.journal.close_run(run_id)
    for org_id, op_id in samples:
        waiting = await service.journal.outcome(org_id, op_id, 0)
        if isinstance(waiting, Waiting) and waiting.unserved:
            await service.journal.cancel(org_id, op_id)
    return ended
