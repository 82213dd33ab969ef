"""How a replica takes a queued sample out of the shared queue, or tells the generator that draws it to stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from scheduler.links.broadcasts import Broadcasts
from scheduler.links.contract import QueueUnreachable
from scheduler.links.redis_queue import RedisQueue

log = logging.getLogger(__name__)

#: How long a cancel is tried while Redis is away; after that the sample is drawn.
TRIES_S = 60.0
AGAIN_S = 0.5


class Cancels:
    """`run` runs blocking calls in a thread."""

    def __init__(self, queue: RedisQueue, broadcasts: Broadcasts, run: Callable[..., Awaitable[bool]]) -> None:
        self._queue, self._broadcasts, self._run = queue, broadcasts, run

    async def withdraw(self, op_id: str) -> bool:
        """Take the sample from the shared queue. True if the queue no longer holds it, so that it can be ended as
        cancelled."""
        loop = asyncio.get_running_loop()
        until = loop.time() + TRIES_S
        while loop.time() < until:
            try:
                return await self._run(self._withdraw, op_id)
            except QueueUnreachable as error:
                log.warning("operation %s is to be cancelled: %s; again in %.1f s", op_id, error, AGAIN_S)
                await asyncio.sleep(AGAIN_S)
        return False

    def _withdraw(self, op_id: str) -> bool:
        """Remove the sample, or cancel it at its generator. If the queue does not know it, it was removed and the reply
        was lost; or it was answered and settled, and then it cannot end again."""
        if self._queue.remove(op_id):
            return True
        worker = self._queue.holder(op_id)
        if worker is not None:
            self._broadcasts.cancel(worker, op_id)
        return worker is None and not self._queue.known([op_id])
