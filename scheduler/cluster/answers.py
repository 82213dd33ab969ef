"""Settling the answers of generators: every replica takes answers from the shared queue, and whichever takes one first
ends its operation."""

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

#: Pause after a failure to take or settle answers.
AGAIN_S = 1.0
#: How many answers with blobs may be settled at a time: each may have INLINE_BYTES in memory.
MOST_STORING = 1024
#: How often a replica that leads, and is not alone, looks whether the other replicas take the answers.
LOOK_S = 0.1


class SampleAnswers:
    """Takes answers as `replica`. While `leads()`, it leaves them to other replicas as long as those keep up: leading
    is enough work. An answer is forgotten once it is settled; until then another replica may take it. Answers with
    blobs wait for the store without holding up the others."""

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
        self._storing: dict[str, asyncio.Task[None]] = {}  # answers being settled that have something in blobs

    async def settle(self) -> None:
        """Take and settle answers for as long as the server runs."""
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
        # those beyond the limit are taken again later
        for answer in list(stored.values())[: max(0, MOST_STORING - len(self._storing))]:
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
        """The operations of these answers that may not have ended. An operation accepted here is known in memory, and
        one accepted elsewhere is packed with its answer; settling one that has ended does nothing. Only for answers
        with blobs is the database asked, because their blobs are written before they are settled."""
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
        """Settle one answer. Returns None if that is not possible for now."""
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
        except (FileNotFoundError, Damaged):  # its result is lost: the request is sampled again
            settled.ref = ""
        except Exception:
            log.exception("the answer to %s could not be settled; another look is taken at it", answer.id)
            return None
        return settled

    def _delete(self, ref: str) -> None:
        with suppress(OSError):  # the reaper deletes it later
            self._blobs.delete(ref)


def _is_stored(answer: Answered) -> bool:
    """True if the answer's result, or the logprobs recorded with the result, is a blob or becomes one."""
    if len(answer.result) > SMALL_BYTES:
        return True
    try:
        parcel = parcel_of(answer.result)
    except msgspec.MsgspecError:  # another version has written it
        return False
    return parcel.payload_ref != "" or (isinstance(parcel.message, Done) and parcel.message.recorded)


@dataclass
class _Settled:
    """A settled answer, the tokens to correct its flow at `path` by, and the blob of its result, which is no longer
    needed."""

    answer: Answered
    path: Path = ()
    tokens: int = 0
    ref: str = ""
