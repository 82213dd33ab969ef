"""From what a generator has answered to an operation that has ended: on every replica, whichever comes first."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from datetime import UTC, datetime

from scheduler.cluster.shared_journal import SharedJournal
from scheduler.links.contract import Answered, FairQueue, QueueUnreachable
from scheduler.links.large_results import unpack
from scheduler.links.messages import Done
from scheduler.order.timings import Stretch
from store.blobs import Blobs

log = logging.getLogger(__name__)

#: Before another try, when answers cannot be taken.
AGAIN_S = 1.0


class SampleAnswers:
    """`replica` is who takes them. An answer is forgotten when it is settled; until then another may take it."""

    def __init__(self, journal: SharedJournal, queue: FairQueue, blobs: Blobs, replica: str) -> None:
        self._journal, self._queue, self._blobs, self._replica = journal, queue, blobs, replica

    async def settle(self) -> None:
        """For as long as the server runs."""
        while True:
            try:
                answers = await self._journal.run(self._queue.answered, self._replica, 1.0)
            except QueueUnreachable:
                await asyncio.sleep(AGAIN_S)
                continue
            except Exception:
                log.exception("answers cannot be taken; trying again")
                await asyncio.sleep(AGAIN_S)
                continue
            await asyncio.gather(*(self._settle(answer) for answer in answers))

    async def _settle(self, answer: Answered) -> None:
        journal = self._journal
        try:
            done, ref = await journal.run(unpack, answer.result, self._blobs)
            op = await journal.run(journal.queued_row, answer.id)
            if op is not None and isinstance(done, Done):
                op.charged, begun = answer.cost, datetime.fromtimestamp(answer.leased_at, UTC)
                op.timings.begin(Stretch(0, 1, 1, op.tokens, max(begun, op.accepted_at)))
                await journal.end(op, done)
                if done.failure is None:
                    await journal.reach(self._queue.correct, op.path, journal.corrected(op, done))
        except FileNotFoundError:  # its result is gone: it is sampled again
            ref = ""
        except Exception:
            log.exception("the answer to %s could not be settled; another look is taken at it", answer.id)
            return
        await journal.reach(self._queue.forget, answer.id, answer.receipt)
        if ref:
            with suppress(OSError):  # then the reaper finds it
                await journal.run(self._blobs.delete, ref)
