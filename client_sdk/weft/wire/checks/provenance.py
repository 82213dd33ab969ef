"""What is wrong with provenance spans: they must tile their field, and a token with an advantage must be a sampled
one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.wire.account.limits import LossLimits
from weft.wire.binary.train_codec import ArrayDatum
from weft.wire.checks.problem import Problem
from weft.wire.inputs import SampledProvenanceSpan


def span_problems(datum: ArrayDatum, loss: LossLimits, loss_fn: str) -> Iterator[Problem]:
    """Spans come as a pair and tile their fields. A loss that takes what was recorded trains sampled tokens only."""
    mine, targets = datum.model_input_spans, datum.loss_fn_input_spans
    if (mine is None) != (targets is None):
        where, field = "loss_fn_input_spans", "model_input_spans"
        yield Problem(where, f"{field} and {where} come as a pair or not at all")
        return
    if mine is None or targets is None:
        return
    covered, tokens = sum(span.length for span in mine), len(datum.tokens)
    if covered != tokens:
        yield _untiled("model_input_spans", covered, tokens)
    untiled = [*target_span_problems(datum)]
    yield from untiled
    advantages = datum.inputs.get("advantages")
    if untiled or not loss.recorded or advantages is None:
        return
    sampled = np.repeat([isinstance(span, SampledProvenanceSpan) for span in targets], [s.length for s in targets])
    if advantages.shape != sampled.shape:
        return
    wrong = np.flatnonzero((advantages != 0) & ~sampled)
    if wrong.size:
        what = (
            f"the advantage at position {int(wrong[0])} is not 0, but its spans say that this target is of a prompt; "
            f"{loss_fn} trains sampled tokens only"
        )
        yield Problem("loss_fn_inputs['advantages']", what)


def target_span_problems(datum: ArrayDatum) -> Iterator[Problem]:
    """The spans of the targets must cover every position, and no more."""
    targets = datum.inputs.get("target_tokens")
    positions = len(datum.tokens) if targets is None or not targets.ndim else len(targets)
    covered = sum(span.length for span in datum.loss_fn_input_spans or [])
    if covered != positions:
        yield _untiled("loss_fn_input_spans", covered, positions)


def _untiled(field: str, covered: int, positions: int) -> Problem:
    what = f"{field} cover {covered} positions of {positions}; they must tile all of them"
    return Problem(field, what, positions, covered)
