"""Operations that arrived before one that they follow, which never comes: they are given up after a while.

Until then they hold their organisation's money, so a client that numbers operations and leaves a gap could keep it from
everybody else for as long as its session lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from scheduler.order.lanes import RunLane
from scheduler.order.operations import Operation

#: A parked operation waits at least so long for the next one of its run to arrive, and at most twice. It is counted
#: while nothing before the gap is at work, for what comes next may be made of its result.
GAP_LASTS_S = 600.0
#: In so many pieces: while this process stands still nothing can arrive, and however long that is, it is one of them.
PIECES = 60


class Gaps:
    """`give_up` ends an operation with what its client is told. Lives in one event loop."""

    def __init__(self, give_up: Callable[[Operation, str], None]) -> None:
        self._give_up = give_up
        self._watching: dict[str, asyncio.Task[None]] = {}

    def watch(self, lane: RunLane) -> None:
        """Something of this run may be parked."""
        if lane.parked and lane.run_id not in self._watching:
            task = asyncio.get_running_loop().create_task(self._watch(lane))
            self._watching[lane.run_id] = task
            task.add_done_callback(lambda _ended: self._watching.pop(lane.run_id, None))

    async def _watch(self, lane: RunLane) -> None:
        while parked := lane.parked:
            if not await self._lasts(lane):
                continue
            for op in parked:
                if (missing := lane.missing(op)) is not None:
                    self._give_up(
                        op,
                        f"operation {op.seq} has waited {GAP_LASTS_S:.0f} s for operation {missing} of run "
                        f"{lane.run_id}, which has not arrived; it was not run and is not billed: send {missing}, and "
                        "this again under another number",
                    )

    async def _lasts(self, lane: RunLane) -> bool:
        """Whether nothing happens for so long that would end this gap, or could."""
        missing = lane.next_seq
        for _ in range(PIECES):
            await asyncio.sleep(GAP_LASTS_S / PIECES)
            if lane.next_seq != missing or lane.at_work:
                return False
        return True

    def stop(self) -> None:
        for task in self._watching.values():
            task.cancel()
