"""From what a generator has answered to an operation that has ended: on every replica, whichever comes first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from scheduler.cluster.shared_journal import SharedJournal
from scheduler.journal.rows import SMALL_BYTES, unpack
from scheduler.links.contract import Answered, Path, QueueUnreachable
from scheduler.links.large_results import parcel_of, whole
from scheduler.links.messages import Done
from scheduler.links.redis_queue import BATCH, RedisQueue
from scheduler.order.operations import Operation
from scheduler.order.timings import Stretch
from store.blobs.contract import Blobs, Damaged

log = logging.getLogger(__name__)

#: Before another try, when answers cannot be taken.
AGAIN_S = 1.0
#: Answers of which something is being stored in blobs, at most: each may be INLINE_BYTES in memory.
MOST_STORING = 1024
#: How often a replica that leads, and is not alone, looks whether the others take the answers.
LOOK_S = 0.1


class SampleAnswers:
    """`replica` is who takes them, and `leads` whether it leads: then it has enough to do. An answer is forgotten when
    it is settled; until then another may take it. While results that are blobs wait for the store, others are
    settled."""

    def __init__(
        self,
        journal: SharedJournal,
        queue: RedisQueue,
        blobs: Blobs,
        replica: str,
        leads: Callable[[], bool] = lambda: False,
    ) -> None:
        self._journal, self._queue, self._blobs, self._replica = journal, queue, blobs, replica
        self._leads = leads
        self._untaken = "", 0
        self._storing: dict[str, asyncio.Task[None]] = {}  # answers of which something lies in blobs

    async def settle(self) -> None:
        """For as long as the server runs."""
        try:
            await self._settle_on()
        finally:
            for task in self._storing.values():
                task.cancel()

    async def _settle_on(self) -> None:
        while True:
            try:
                answers = await self._take()
            except QueueUnreachable:
                await asyncio.sleep(AGAIN_S)
                continue
            except Exception:
                log.exception("answers cannot be taken; trying again")
                await asyncio.sleep(AGAIN_S)
                continue
            if answers:
                await self._settle_all(answers)

    async def _take(self) -> list[Answered]:
        run, wait_s = self._journal.run, 1.0
        if self._leads() and self._journal.others:
            await asyncio.sleep(LOOK_S)
            before, self._untaken = self._untaken, await run(self._queue.untaken)
            waiting = self._untaken[1]
            if not waiting or (waiting <= BATCH and self._untaken[0] != before[0]):
                return []
            wait_s = 0.0
        return await run(self._queue.answered, self._replica, wait_s)

    async def _settle_all(self, answers: list[Answered]) -> None:
        answers = [answer for answer in answers if answer.id not in self._storing]
        stored = {answer.id: answer for answer in answers if _is_stored(answer)}
        try:
            queued = await self._queued(answers)
        except Exception:
            log.exception("answers cannot be settled; another look is taken at them")
            await asyncio.sleep(AGAIN_S)
            return
        for answer in list(stored.values())[: max(0, MOST_STORING - len(self._storing))]:  # others are taken again
            task = asyncio.create_task(self._settle_some([answer], queued))
            self._storing[answer.id] = task
            task.add_done_callback(lambda _, answer=answer: self._storing.pop(answer.id))  # type: ignore[misc]
        await self._settle_some([answer for answer in answers if answer.id not in stored], queued)

    async def _settle_some(self, answers: list[Answered], queued: dict[str, Operation]) -> None:
        journal = self._journal
        ended = await asyncio.gather(*(self._settle(answer, queued.get(answer.id)) for answer in answers))
        settled = [one for one in ended if one is not None]
        facts = [(one.answer.id, one.answer.receipt, one.path, one.tokens) for one in settled]
        await journal.reach(self._queue.settle, facts)
        await asyncio.gather(*(journal.run(self._delete, one.ref) for one in settled if one.ref))

    async def _queued(self, answers: list[Answered]) -> dict[str, Operation]:
        """The operations that may not have ended. What was accepted here is known, what elsewhere comes with its
        answer, and settling it again does nothing; but what lies in blobs is written before: for that the database is
        asked."""
        journal = self._journal
        small = (answer for answer in answers if not _is_stored(answer))
        known = {op.id: op for op in map(self._known, small) if op is not None}
        unknown = [answer.id for answer in answers if answer.id not in known]
        return known | (await journal.run(journal.stored.all_queued, unknown) if unknown else {})

    def _known(self, answer: Answered) -> Operation | None:
        if (op := self._journal.opened(answer.id)) is not None or not answer.op:
            return op
        try:
            return unpack(answer.op)
        except ValueError:  # another version has packed it
            return None

    async def _settle(self, answer: Answered, op: Operation | None) -> _Settled | None:
        """None: it cannot be settled for now."""
        journal, settled = self._journal, _Settled(answer)
        try:
            parcel = parcel_of(answer.result)
            away = bool(parcel.payload_ref)
            done, settled.ref = await journal.run(whole, parcel, self._blobs) if away else whole(parcel, self._blobs)
            if op is not None and isinstance(done, Done):
                op.charged, begun = answer.cost, datetime.fromtimestamp(answer.leased_at, UTC)
                op.timings.begin(Stretch(0, 1, 1, op.tokens, max(begun, op.accepted_at)))
                ended = await journal.end(op, done)
                if ended and done.failure is None:
                    settled.path, settled.tokens = op.path, journal.corrected(op, done)
        except (FileNotFoundError, Damaged):  # its result is lost: it is sampled again
            settled.ref = ""
        except Exception:
            log.exception("the answer to %s could not be settled; another look is taken at it", answer.id)
            return None
        return settled

    def _delete(self, ref: str) -> None:
        with suppress(OSError):  # then the reaper finds it
            self._blobs.delete(ref)


def _is_stored(answer: Answered) -> bool:
    """Whether its result is a blob or becomes one, or something beside it does."""
    if len(answer.result) > SMALL_BYTES:
        return True
    try:
        parcel = parcel_of(answer.result)
    except msgspec.MsgspecError:  # another version has written it
        return False
    return parcel.payload_ref != "" or (isinstance(parcel.message, Done) and parcel.message.recorded)


@dataclass
class _Settled:
    """An answer that was settled, the tokens that its flow at `path` is to be corrected by, and the blob of its
    result, which is not needed any more."""

    answer: Answered
    path: Path = ()
    tokens: int = 0
    ref: str = ""
