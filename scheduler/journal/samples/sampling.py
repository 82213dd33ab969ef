"""A sample on its way to generators: as an item of the fair queue, and as the message that describes it."""

from __future__ import annotations

import numpy as np
from weft.wire.binary.sample_codec import SampleUsage, SequenceResult, encode_sample_response

from scheduler.journal.samples.samplers import SamplerFacts
from scheduler.links.contract import LIVES, Item
from scheduler.links.messages import Done, Failure, SampleOp
from scheduler.order.operations import INTERACTIVE, SAMPLE, UNKEPT, Operation

GAVE_UP = (
    f"the generator stopped {LIVES} times while it ran this operation, or had no memory for it; it was given up and is "
    "not billed"
)

CUT_OFF = "the server was restarted while the connection for this sample was open; nothing is billed: send it again"


def samples_of(op: Operation) -> int:
    return op.sample.num_samples


def undrawn(op: Operation) -> Done:
    """The result of a sample that was cancelled before it began: empty sequences, and nothing is billed."""
    empty = SequenceResult(np.zeros(0, np.int32), np.zeros(0, np.float32), "length")
    return Done(op.id, encode_sample_response([empty] * samples_of(op), usage=SampleUsage()))


def cut_off(op: Operation) -> Done | None:
    """How a running sample ends when its server stops: cut off if nobody can fetch it later; None if a client may come
    back."""
    return Done(op.id, failure=Failure(CUT_OFF)) if op.kind == SAMPLE and op.seq >= UNKEPT else None


def needed(op: Operation, sampler: SamplerFacts) -> str:
    """The name of what a generator keeps in memory after it has served `op`: the adapter (its run's id if the sampler
    follows a run), or for the base model the organisation, whose prompts are cached."""
    return (sampler.run_id if sampler.inflight else sampler.adapter_ref) or op.org_id


def item_of(op: Operation, sampler: SamplerFacts, weight: int, body: bytes = b"", packed: bytes = b"") -> Item:
    """`op` as an item of the queue, at its expected cost of now. `packed` is for whoever settles it."""
    return Item(op.id, op.path, op.charged, body, samples_of(op), weight, needed(op, sampler), packed)


def message_of(op: Operation, sampler: SamplerFacts, version: int = 0) -> SampleOp:
    return SampleOp(
        op.id,
        op.base_model,
        op.body_ref,
        samples_of(op),
        sampler.adapter_ref,
        op.session_id,
        op.org_id,
        run_id=sampler.run_id or "",
        inflight=sampler.inflight,
        version=version,
        priority=int(op.sample.priority == INTERACTIVE),
        body=op.body,
        body_sha256=op.body_sha256,
        origin=op.origin,
    )
