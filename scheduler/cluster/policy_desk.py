"""The leader's end of the channel that tells generators of new policies over Redis (`scheduler.links.policies`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import islice
from typing import Any

from scheduler.journal.training import Training
from scheduler.links.messages import PolicyMoved
from scheduler.links.policies import MOST_MOVES, PolicyBoard
from scheduler.order.operations import Operation
from scheduler.order.presence import Present

#: Pause between two messages about moved policies: every generator reads each message, so several moves go together.
TOGETHER_S = 0.05
#: How often the leader checks that Redis still has all policies.
LOOK_AGAIN_S = 2.0


class PolicyDesk:
    """The leader's end, as a desk of its runs. `run` runs blocking calls in a thread."""

    worker = "generator"

    def __init__(self, training: Training, board: PolicyBoard, run: Callable[..., Awaitable[Any]]) -> None:
        self._training, self._board, self._run = training, board, run
        self._versions: dict[str, tuple[int, int]] = {}  # by run: the operation that moved it last, and its version
        # by run: the operation that moved it last, and the weights of its inflight samplers
        self._weights: dict[str, tuple[int, str]] = {}
        self._untold: set[str] = set()
        self._moves = asyncio.Event()
        self._look_at = 0.0
        training.desks.append(self)

    def presence(self, base_model: str) -> Present:
        """Generators report their presence at the shared queue, not here."""
        return Present(here=True, serves=True)

    def wake(self) -> None:
        """Nothing to wake: generators come to the shared queue by themselves."""

    def cancel(self, op: Operation) -> None:
        """Nothing to cancel here: replicas cancel samples."""

    def policy_moved(self, moved: PolicyMoved) -> None:
        """Note a move. Two operations of a run may be settled in either order: the later operation counts."""
        run_id, none = moved.run_id, (-1, 0)
        self._versions[run_id] = max(self._versions.get(run_id, none), (moved.seq, moved.version))
        if moved.adapter_ref:
            self._weights[run_id] = max(self._weights.get(run_id, (-1, "")), (moved.seq, moved.adapter_ref))
        self._untold.add(run_id)
        self._moves.set()

    async def tell(self) -> None:
        """Tell generators of moves when they happen; and every LOOK_AGAIN_S of policies that Redis does not have."""
        loop = asyncio.get_running_loop()
        if (left := self._look_at - loop.time()) <= 0:
            await self._look()
            self._look_at = loop.time() + LOOK_AGAIN_S
        elif not self._untold:
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._moves.wait()
        self._moves.clear()
        if self._untold:
            moves = [self._newest(run_id) for run_id in islice(self._untold, MOST_MOVES)]
            await self._run(self._board.tell, moves)
            self._untold.difference_update(moved.run_id for moved in moves if moved == self._newest(moved.run_id))
            await asyncio.sleep(TOGETHER_S)

    async def _look(self) -> None:
        if over := self._versions.keys() - self._training.runs.keys():
            await self._run(self._board.forget, over)
            for run_id in over:
                del self._versions[run_id]
                self._weights.pop(run_id, None)
                self._untold.discard(run_id)
        known = await self._run(self._board.known, list(self._versions))
        self._untold |= {run_id for run_id in self._versions if known.get(run_id) != self._newest(run_id)}

    def _newest(self, run_id: str) -> PolicyMoved:
        seq, version = self._versions[run_id]
        return PolicyMoved(run_id, version, self._weights.get(run_id, (-1, ""))[1], seq)
