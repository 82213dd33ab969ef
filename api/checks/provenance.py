"""Where training data come from: spans that name sampled sequences, and the logprobs recorded when those were sampled.

stable_reinforce needs the sampler's logprobs. Recipes send them, with the spans beside; data that carry spans alone get
what the sampler recorded (`record_stability_info`). Recordings belong to the session that sampled them.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from weft.wire import SampledProvenanceSpan
from weft.wire.codec import ArrayDatum, TrainBatch

from api.errors import Invalid, quote
from scheduler.links.messages import stability_ref
from store.blobs import BadRef, Blobs

Floats = npt.NDArray[np.float32]


def check_spans(batch: TrainBatch) -> None:
    """Spans come as a pair and tile their fields. With stable_reinforce only sampled tokens may have an advantage."""
    for index, datum in enumerate(batch.data):
        mine, targets = datum.model_input_spans, datum.loss_fn_input_spans
        if (mine is None) != (targets is None):
            raise Invalid(f"datum {index}: model_input_spans and loss_fn_input_spans come as a pair or not at all")
        if mine is None or targets is None:
            continue
        _check_tiling(index, "model_input_spans", sum(span.length for span in mine), len(datum.tokens))
        _check_tiling(index, "loss_fn_input_spans", *_lengths(datum))
        if batch.loss_fn == "stable_reinforce":
            _check_advantages(index, datum)


def with_recorded_logprobs(batch: TrainBatch, session_id: str, blobs: Blobs) -> tuple[TrainBatch, dict[int, Floats]]:
    """The batch with `logprobs` wherever they were missing, and those alone by datum. Raises Invalid for a datum that
    has neither logprobs nor spans, and for a sequence of which nothing is recorded."""
    found: dict[int, Floats] = {}
    kept: dict[str, Floats] = {}
    for index, datum in enumerate(batch.data):
        if "logprobs" in datum.inputs:
            continue
        if datum.loss_fn_input_spans is None:
            raise Invalid(
                f"datum {index}: stable_reinforce needs the input 'logprobs', or provenance spans that name sequences "
                "sampled with record_stability_info"
            )
        covered, positions = _lengths(datum)
        _check_tiling(index, "loss_fn_input_spans", covered, positions)
        found[index] = _recorded(index, datum, session_id, blobs, kept)
    data = [
        replace(datum, inputs={**datum.inputs, "logprobs": found[index]}) if index in found else datum
        for index, datum in enumerate(batch.data)
    ]
    return replace(batch, data=data), found


def _recorded(index: int, datum: ArrayDatum, session_id: str, blobs: Blobs, kept: dict[str, Floats]) -> Floats:
    """float32 [T]: what each sampled target was sampled with, 0 for targets of a prompt."""
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
        os.utime(blobs.path(ref))  # recordings are kept for a day after their last use
    except (BadRef, OSError):
        raise Invalid(
            f"datum {index}: nothing is recorded of sequence {quote(sequence)} in this session: sample it with "
            "record_stability_info, train on it within a day, or send logprobs"
        ) from None
    return np.frombuffer(data, dtype="<f4")


def _lengths(datum: ArrayDatum) -> tuple[int, int]:
    """Positions that the spans of the targets cover, and positions there are."""
    targets = datum.inputs.get("target_tokens")
    positions = len(datum.tokens) if targets is None or not targets.ndim else len(targets)
    return sum(span.length for span in datum.loss_fn_input_spans or []), positions


def _check_tiling(index: int, field: str, covered: int, positions: int) -> None:
    if covered != positions:
        raise Invalid(f"datum {index}: {field} cover {covered} positions of {positions}; they must tile all of them")


def _check_advantages(index: int, datum: ArrayDatum) -> None:
    spans = datum.loss_fn_input_spans or []
    sampled = np.repeat([isinstance(span, SampledProvenanceSpan) for span in spans], [span.length for span in spans])
    wrong = np.flatnonzero((datum.inputs["advantages"] != 0) & ~sampled)
    if wrong.size:
        raise Invalid(
            f"datum {index}: the advantage at position {int(wrong[0])} is not 0, but its spans say that this target is "
            "of a prompt; stable_reinforce trains sampled tokens only"
        )
