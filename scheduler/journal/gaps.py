"""Gaps in a run's sequence numbers: if an operation never arrives, the later ones go on without it after a while.

A client may count a number that never reaches the server: a proxy refused its body, and the client counts on. Until it
is given up, what waits for it holds its organisation's money, and the run stands still. Then the number is spent, as by
an operation that failed, and a step that counts on it is not taken (`scheduler.order.gradients`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextvars import Context
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from scheduler.journal.rows import from_row, to_row
from scheduler.journal.storing import Storing, Unrecorded
from scheduler.links.messages import NEVER_CAME
from scheduler.order.lanes import RunLane
from scheduler.order.operations import Operation
from scheduler.order.plans import BODY_ONLY
from store import tables
from store.people.secret import new_id

log = logging.getLogger(__name__)

#: How long a parked operation waits for the missing one, at least; at most twice as long. Time counts only while no
#: operation before the gap is being computed: the client may need its result for the missing one.
GAP_LASTS_S = 600.0
#: The wait is counted in this many pieces. However long this process stands still, when nothing can arrive, only one
#: piece passes.
PIECES = 60
#: The widest gap that is filled. Each spent number becomes a row, and a client may send any number: beyond a wider gap
#: the waiting operations are given up instead.
WIDEST = 1000


class Gaps:
    """`skip` lets a run go on without a failed operation; `give_up` fails an operation with a message for its client.
    Lives in one event loop."""

    def __init__(
        self, storing: Storing, skip: Callable[[Operation, str | None], None], give_up: Callable[[Operation, str], None]
    ) -> None:
        self._storing, self._skip, self._give_up = storing, skip, give_up
        self._watching: dict[str, asyncio.Task[None]] = {}

    def watch(self, lane: RunLane) -> None:
        """Start watching the run if it has parked operations."""
        if lane.parked and lane.run_id not in self._watching:
            # The task belongs to the run, not to the request that happens to start it.
            task = asyncio.get_running_loop().create_task(self._watch(lane), context=Context())
            self._watching[lane.run_id] = task
            task.add_done_callback(lambda _ended: self._watching.pop(lane.run_id, None))
            task.add_done_callback(self._storing.ended)

    async def _watch(self, lane: RunLane) -> None:
        while parked := lane.parked:
            if not await self._lasts(lane):
                continue
            waiting = [op for op in parked if lane.missing(op) is not None]
            first = min(waiting, key=lambda op: op.seq, default=None)
            if first is not None and first.seq - lane.next_seq <= WIDEST:
                await self._go_on_without(lane, first)
                continue
            for op in waiting:
                self._give_up(
                    op,
                    f"operation {op.seq} has waited {GAP_LASTS_S:.0f} s for operation {lane.next_seq} of run "
                    f"{lane.run_id}, which has not arrived; it was not run and is not billed: send {lane.next_seq}, "
                    "and this again under another number",
                )

    async def _lasts(self, lane: RunLane) -> bool:
        """Wait for GAP_LASTS_S. True if the gap has then lasted without progress: the missing number has not come, and
        nothing before it is computed."""
        missing = lane.next_seq
        for _ in range(PIECES):
            await asyncio.sleep(GAP_LASTS_S / PIECES)
            if lane.next_seq != missing or lane.at_work:
                return False
        return True

    async def _go_on_without(self, lane: RunLane, first: Operation) -> None:
        """Spend the numbers before `first`, for this and every other server."""
        numbers = [seq for seq in range(lane.next_seq, first.seq) if not lane.spent(seq)]
        log.warning("run %s goes on without operations %s, which never arrived", lane.run_id, numbers)
        rows = [_row(first, seq) for seq in numbers]
        try:
            ended = await self._storing.change(lambda session: _spend(session, lane.run_id, rows))
        except Unrecorded as error:  # another server is accepting one of them just now
            log.warning("run %s does not go on yet: %s", lane.run_id, error)
            return
        for row in ended:
            self._skip(from_row(row), row.error)

    def stop(self) -> None:
        for task in self._watching.values():
            task.cancel()


def _row(behind: Operation, seq: int) -> dict[str, Any]:
    """The row of a number that never arrived; operation `behind` it has waited long enough."""
    now = datetime.now(UTC)
    op = Operation(
        id=new_id(),
        org_id=behind.org_id,
        session_id=behind.session_id,
        lane=behind.lane,
        seq=seq,
        kind=NEVER_CAME,
        base_model=behind.base_model,
        tokens=0,
        body_ref="",
        plan=BODY_ONLY,
        accepted_at=now,
        project_id=behind.project_id,
    )
    why = (
        f"operation {seq} of run {behind.lane} never arrived, and operation {behind.seq} has waited {GAP_LASTS_S:.0f} "
        "s for it. Look at what your client was told when it sent it: a proxy before the server may refuse large "
        "bodies (HTTP 413; nginx does beyond client_max_body_size)"
    )
    return to_row(op, "") | {"state": "failed", "error": why, "error_category": "user", "finished_at": now}


def _spend(session: Session, run_id: str, rows: Sequence[dict[str, Any]]) -> list[tables.Operation]:
    """Insert the rows whose numbers are still free. Returns all operations with these numbers that have ended."""
    row = tables.Operation
    these = select(row).where(row.lane == run_id, row.seq.in_([new["seq"] for new in rows]))
    taken = {one.seq for one in session.scalars(these)}
    if new := [one for one in rows if one["seq"] not in taken]:
        session.execute(insert(row), new)
    return list(session.scalars(these.where(row.state != "queued").order_by(row.seq)))
