"""What is wrong with where data say they come from, and with inputs that depend on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from weft.plan.problem import Problem
from weft.wire.arrays import Array
from weft.wire.error import WireError
from weft.wire.inputs import Datum, SampledProvenanceSpan
from weft.wire.limits import LossLimits

RATIO_MASK = "sequence_ratio_mask"


def span_problems(datum: Datum, inputs: Mapping[str, Array], loss: LossLimits | None, where: str) -> Iterator[Problem]:
    """Spans that do not tile their field; advantages and masks that contradict what they mark."""
    advantages = inputs.get("advantages")
    mask = inputs.get(RATIO_MASK)
    masked = loss is not None and RATIO_MASK in loss.required and mask is not None and advantages is not None
    if masked and not np.any(mask) and np.any(advantages):
        at = f"{where}.loss_fn_inputs[{RATIO_MASK!r}]"
        yield Problem(at, "marks no position, but some advantages are not 0")
    malformed = [*_malformed(datum, where)]
    yield from malformed
    if malformed:
        return
    targets = inputs.get("target_tokens")
    yield from _tiling(datum, None if targets is None or not targets.ndim else targets.shape[0], where)
    spans = datum.loss_fn_input_spans
    if not spans or loss is None or not loss.recorded or advantages is None or advantages.ndim != 1:
        return
    sampled = np.repeat([isinstance(span, SampledProvenanceSpan) for span in spans], [span.length for span in spans])
    if sampled.size == advantages.size and (advantages[~sampled.astype(bool)] != 0).any():
        at = f"{where}.loss_fn_inputs['advantages']"
        yield Problem(at, "not 0 at targets that the spans say are of a prompt; this loss trains sampled tokens only")


def _malformed(datum: Datum, where: str) -> Iterator[Problem]:
    """Spans that cannot be sent."""
    if bool(datum.model_input_spans) != bool(datum.loss_fn_input_spans):  # on the wire, no spans are none at all
        yield Problem(f"{where}.loss_fn_input_spans", "model_input_spans and these come as a pair or not at all")
    for name in ("model_input_spans", "loss_fn_input_spans"):
        for index, span in enumerate(getattr(datum, name) or ()):
            if not span.sequence_id or span.offset < 0 or span.length < 0:
                rule = "a sequence_id, and offset and length of at least 0"
                yield Problem(f"{where}.{name}[{index}]", "not a span", rule, str(span))


def _tiling(datum: Datum, positions: int | None, where: str) -> Iterator[Problem]:
    try:
        length = datum.model_input.length
    except WireError:
        return  # reported where tokens are checked
    for name, spans, wanted in (
        ("model_input_spans", datum.model_input_spans, length),
        ("loss_fn_input_spans", datum.loss_fn_input_spans, positions),
    ):
        covered = sum(span.length for span in spans or ())
        if spans and wanted is not None and covered != wanted:
            yield Problem(f"{where}.{name}", "must cover every position, and no more", wanted, covered)
