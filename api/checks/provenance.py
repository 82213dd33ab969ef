"""Where training data come from: spans that name sampled sequences, and the logprobs recorded when those were sampled.

stable_reinforce needs the sampler's logprobs. Recipes send them, with the spans beside; data that carry spans alone get
what the sampler recorded (`record_stability_info`). Recordings belong to the session that sampled them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
from weft.wire import SampledProvenanceSpan
from weft.wire.binary.train_codec import ArrayDatum, TrainBatch
from weft.wire.checks.batches import refusal
from weft.wire.checks.provenance import target_span_problems

from api.errors import Invalid, quote
from scheduler.links.messages import stability_ref
from store.blobs.contract import BadRef, Blobs, is_lasting

#: How many sequences of one operation are remembered, and how long a sequence's name may be.
MAX_NAMED, MAX_NAME = 4096, 72

Floats = npt.NDArray[np.float32]


def with_recorded_logprobs(batch: TrainBatch, session_id: str, blobs: Blobs) -> tuple[TrainBatch, dict[int, Floats]]:
    """The batch with recorded `logprobs` for all data that have only spans; and those logprobs, by datum. Raises
    Invalid if nothing is recorded of a sequence."""
    found: dict[int, Floats] = {}
    kept: dict[str, Floats] = {}
    for index, datum in enumerate(batch.data):
        if "logprobs" in datum.inputs or datum.loss_fn_input_spans is None:
            continue
        for problem in target_span_problems(datum):
            raise Invalid(refusal((index, problem)))
        found[index] = _recorded(index, datum, session_id, blobs, kept)
    data = [
        replace(datum, inputs={**datum.inputs, "logprobs": found[index]}) if index in found else datum
        for index, datum in enumerate(batch.data)
    ]
    return replace(batch, data=data), found


def named_sequences(batch: TrainBatch) -> dict[str, int]:
    """The sequences that the targets name as their source, each with its number of targets; of very many only the
    first. Whether they belong to the run is for the caller to check."""
    named: dict[str, int] = {}
    for datum in batch.data:
        for span in datum.loss_fn_input_spans or ():
            if not isinstance(span, SampledProvenanceSpan) or not span.length or len(span.sequence_id) > MAX_NAME:
                continue  # a name without any target would be stored for nothing
            if span.sequence_id in named or len(named) < MAX_NAMED:
                named[span.sequence_id] = named.get(span.sequence_id, 0) + span.length
    return named


def _recorded(index: int, datum: ArrayDatum, session_id: str, blobs: Blobs, kept: dict[str, Floats]) -> Floats:
    """The logprobs with which the datum's targets were sampled, float32 [T]; 0 for targets copied from a prompt."""
    parts = []
    for span in datum.loss_fn_input_spans or []:
        if not isinstance(span, SampledProvenanceSpan):
            parts.append(np.zeros(span.length, np.float32))
            continue
        if span.sequence_id not in kept:
            kept[span.sequence_id] = _read(index, span.sequence_id, session_id, blobs)
        recording = kept[span.sequence_id]
        if span.offset + span.length > len(recording):
            raise Invalid(
                f"datum {index}: a span covers tokens {span.offset} to {span.offset + span.length} of sequence "
                f"{quote(span.sequence_id)}, which has {len(recording)} sampled tokens"
            )
        parts.append(recording[span.offset : span.offset + span.length])
    return np.concatenate(parts)


def _read(index: int, sequence: str, session_id: str, blobs: Blobs) -> Floats:
    ref = stability_ref(session_id, sequence)
    try:
        if "/" in sequence:
            raise BadRef(sequence)
        data = blobs.get(ref)
        blobs.touch(ref)  # recordings are deleted a day after their last use
    except (BadRef, OSError) as error:
        if not is_lasting(error):  # temporary: a refusal would spend the operation's number
            raise
        raise Invalid(
            f"datum {index}: nothing is recorded of sequence {quote(sequence)} in this session: sample it with "
            "record_stability_info, train on it within a day, or send logprobs"
        ) from None
    return np.frombuffer(data, dtype="<f4")
