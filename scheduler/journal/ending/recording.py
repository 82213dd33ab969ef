"""How an operation ended, made durable: its result as a blob, then its row, its metering and what it made in one commit
(`scheduler.journal.ending.settlement`)."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np
from weft.wire.binary.sample_codec import decode_sample_response

from billing.prices import PriceList
from scheduler.journal.ending.outcomes import Answers, result_ref, text_of
from scheduler.journal.ending.settlement import Ending, Settled, Settlement, result_of
from scheduler.journal.samples.samplers import Samplers
from scheduler.journal.storing import until_stored
from scheduler.links.messages import Done, sequence_id, stability_ref
from scheduler.order.operations import SAMPLE, Operation, Outcome
from store import logs, tracing
from store.blobs.contract import Blobs, beside_the_loop
from store.blobs.room import Room
from store.database.db import Transactions

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ended:
    """How an operation ended. `freed`: weights that nothing needs any more. `unrecorded`: why its result could not be
    recorded; "" if it was."""

    outcome: Outcome
    freed: list[str] = field(default_factory=list)
    unrecorded: str = ""


class DatabaseRecorder:
    def __init__(
        self, database: Transactions, blobs: Blobs, prices: PriceList, room: Room, answers: Answers, samplers: Samplers
    ) -> None:
        self._database, self._blobs, self._room = database, blobs, room
        self._settlement = Settlement(prices)
        self._answers, self._samplers = answers, samplers

    async def record(self, op: Operation, done: Done) -> Ended | None:
        """Store a worker's answer. Returns once it is durable; None if it already was."""
        with logs.on(**op.facts):
            ended = await self._record(op, done)
            if ended is not None:
                failed = ended.outcome.error is not None
                log.debug("%s %s", op.kind, "failed" if failed else "done")
                if tracing.on():
                    _trace(op, failed=failed)
            return ended

    async def _record(self, op: Operation, done: Done) -> Ended | None:
        try:
            settled = await self._write(op, done, result_of(op, done))
        except Exception as error:
            log.exception("operation %s could not be settled", op.id)
            outcome = Outcome(error="the server could not record the result; it is not billed")
            with suppress(Exception):  # its hold is released with its failure, now or after a restart
                await self._write(op, done, outcome)
            return Ended(outcome, unrecorded=type(error).__name__)
        return Ended(*settled) if settled is not None else None

    async def _write(self, op: Operation, done: Done, result: Outcome) -> Settled:
        """Store the result and settle, trying for as long as it takes: an operation that was applied is never answered
        as failed."""
        tried = 0

        async def attempt() -> Settled:
            nonlocal tried
            tried += 1
            if result.error is None and done.recorded:
                threads = self._blobs.threads  # a pool of its own: many slow writes would fill the event loop's
                await asyncio.get_running_loop().run_in_executor(threads, keep_logprobs, op, done.payload, self._blobs)
            if result.error is None and text_of(result) is None:  # written before the commit that refers to it
                await beside_the_loop(self._blobs, self._blobs.put, result_ref(op.id), result.payload)
            run_id = await self._samplers.run_of(op.lane) if op.kind == SAMPLE else op.lane
            ending = Ending(op, done, result, run_id)
            settled: Settled = await self._database.write_batched(self._settlement.settle, ending, lock=op.org_id)
            return await asyncio.to_thread(self._settled_before, op) if settled is None and tried > 1 else settled

        def refused(error: Exception, pause_s: float) -> None:
            what = self._room.refused(error)
            op.stuck = f"computed; {what}; it is tried again until it can be stored"
            log.warning("operation %s: %s; again in %.1f s", op.id, what, pause_s)

        return await until_stored(attempt, refused)

    def _settled_before(self, op: Operation) -> Settled:
        stored = self._answers.stored(op.org_id, op.id)
        return (stored, []) if isinstance(stored, Outcome) else None


def keep_logprobs(op: Operation, payload: bytes, blobs: Blobs) -> None:
    """Store the logprobs of each sampled sequence, for training. It is done before the answer, because a client that
    has the answer may train at once. It is done here and not in the generator, because a generator that was given up
    may still end after another one, with newer weights, has answered. Empty sequences are skipped: a thousand of them
    cost no more than their prompt, so files for them could be had for nothing."""
    for sample, sequence in enumerate(decode_sample_response(payload).sequences):
        if sequence.tokens.size:
            logprobs = np.asarray(sequence.logprobs, dtype="<f4")
            blobs.put(stability_ref(op.session_id, sequence_id(op.id, sample)), logprobs.tobytes())


def _trace(op: Operation, *, failed: bool) -> None:
    """Make the spans of an ended operation: its whole life, as a child of its request's span, and in it the wait in the
    queue, each stretch in a worker's hands, and the settling."""
    now = datetime.now(UTC)
    facts: dict[str, tracing.Value | None] = {
        "org": op.org_id,
        "run": op.run_id,
        "operation": op.id,
        "tokens": op.tokens,
    }
    own = tracing.span(f"operation {op.kind}", op.origin, op.accepted_at, now, facts, failed=failed)
    stretches, computed = op.timings.stretches, op.timings.computed
    if stretches:
        tracing.span("queue", own, op.accepted_at, stretches[0].start)
    for part in stretches:
        shared: dict[str, tracing.Value | None] = {"pass": part.pass_id, "runs": part.runs, "tokens": part.tokens}
        tracing.span("work", own, part.start, part.end or computed or now, shared)
    if computed is not None:
        tracing.span("settle", own, computed, now)
