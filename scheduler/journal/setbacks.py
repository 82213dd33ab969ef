"""Runs that cannot go on for now, or not at all.

A run whose files cannot be read for a moment, or over which trainers die again and again, waits, longer each time; no
other run waits for it, and none of its operations fails. A run that cannot be rebuilt as it was is broken, for good: it
does nothing more, and its user is told why and what is left of it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

import anyio.to_thread
from sqlalchemy import update
from sqlalchemy.exc import SQLAlchemyError

from scheduler.journal.ending.references import broken_because, nothing_left
from scheduler.journal.storing import Storing
from scheduler.links.messages import SetAside
from scheduler.order.lanes import RunLane, Unit
from store import tables
from store.blobs.contract import Blobs
from store.database.db import Transactions

log = logging.getLogger(__name__)

#: The first and the longest pause of a run that was set aside.
RESUME_S = (0.5, 60.0)
_MOST_DOUBLINGS = 10


class Runs(Protocol):
    """The runs in hand (`scheduler.journal.training`)."""

    runs: dict[str, RunLane]

    def queue_units(self, lane: RunLane, units: list[Unit]) -> None: ...

    def unqueue(self, lane: RunLane) -> None: ...

    def close_for_good(self, lane: RunLane, why: str, category: str) -> None: ...

    def wake(self) -> None: ...


class Setbacks:
    def __init__(self, training: Runs, storing: Storing, database: Transactions, blobs: Blobs) -> None:
        self._training, self._storing = training, storing
        self._database, self._blobs = database, blobs
        self._resuming: set[asyncio.Task[None]] = set()
        self._breaking: set[str] = set()  # runs to be broken, once it is read what is left of them

    def set_aside(self, told: SetAside) -> None:
        """Note that a trainer has left a run's operations out of its pass."""
        lane = self._training.runs.get(told.run_id)
        if lane is None:
            return
        log.warning("run %s is set aside: %s", told.run_id, told.reason)
        if told.lasting:
            self.break_run(lane, told.reason)
        else:
            self.pause(lane, told.reason, kept=told.kept)

    def pause(self, lane: RunLane, why: str, *, kept: bool = False) -> None:
        """Leave a run out for a while; with `kept` a trainer still holds it."""
        self._training.unqueue(lane)
        already = bool(lane.paused)
        lane.pause(why, kept=kept)
        if not already:
            task = asyncio.get_running_loop().create_task(self._resume(lane))
            self._resuming.add(task)
            task.add_done_callback(self._resuming.discard)

    async def _resume(self, lane: RunLane) -> None:
        first_s, longest_s = RESUME_S
        await asyncio.sleep(min(first_s * 2 ** min(lane.setbacks - 1, _MOST_DOUBLINGS), longest_s))
        # so that answered operations are not done again on a run that a trainer still holds
        await self._storing.flush()
        over = lane.broken is not None or lane.run_id in self._breaking
        if self._training.runs.get(lane.run_id) is lane and not over:
            self._training.queue_units(lane, lane.resume())
            self._training.wake()

    def stop(self) -> None:
        """No run is resumed any more."""
        for task in self._resuming:
            task.cancel()

    def missing_for(self, lane: RunLane) -> str:
        """What is missing on the disk to rebuild the run; "" if nothing is. Blobs in a bucket are not checked: the
        trainer that reads them will find out."""
        if self._blobs.threads is not None:
            return ""
        if lane.snapshot is not None and not self._blobs.exists(lane.snapshot.ref):
            return f"its snapshot after operation {lane.snapshot.seq} is missing"
        gone = (op for op in lane.replays() if op.body_ref and not self._blobs.exists(op.body_ref))
        return next((f"the body of operation {op.seq} ({op.kind}) is missing" for op in gone), "")

    def break_run(self, lane: RunLane, reason: str) -> None:
        """The run cannot be rebuilt as it was: break it, for good."""
        if lane.run_id not in self._breaking:
            self._breaking.add(lane.run_id)
            self._training.unqueue(lane)
            lane.pause(reason, kept=False)
            self._storing.in_background(self._break(lane, reason))

    async def _break(self, lane: RunLane, reason: str) -> None:
        try:
            why = await anyio.to_thread.run_sync(self._told, lane.run_id, reason)
        finally:
            self._breaking.discard(lane.run_id)
        log.error("%s", why)
        self._training.close_for_good(lane, why, "server")
        self._training.wake()
        await self._storing.write(update(tables.Run).where(tables.Run.id == lane.run_id).values(broken=why))

    def _told(self, run_id: str, reason: str) -> str:
        """The error text for the run's user; reads the database, so it runs in a thread."""
        try:
            with self._database.read() as session:
                return broken_because(session, run_id, reason)
        except SQLAlchemyError:
            return nothing_left(run_id, reason)
