"""The client's `validate` and the server's checks: no problems means accepted, a refusal means a problem."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st
from weft import Datum, ModelInput, Plan, PlannedTrain
from weft.types import PromptProvenanceSpan, SampledProvenanceSpan
from weft.validate import validate
from weft.wire.codec import decode_train_request
from weft.wire.request_codec import encode_forward_backward
from weft.wire.training import ForwardBackwardInput, ForwardBackwardRequest

from api.errors import Invalid
from api.limits import limits_of
from api.validate.batches import check_batch
from store.settings import Limits
from workers.model.card import read_card
from workers.model.tiny import TINY_PATH
from workers.trainer.loss_inputs import LOSSES

VOCAB, CONTEXT = 20, 6
_CARD = read_card("tiny", TINY_PATH)
CARD = replace(_CARD, config=replace(_CARD.config, vocab_size=VOCAB, context_length=CONTEXT))
LIMITS = Limits(max_tokens_per_op=12)
PUBLISHED = limits_of({"tiny": CARD}, LIMITS, 1024, 5_000_000)

INPUTS = sorted(set().union(*(spec.accepted for spec in LOSSES.values())))
numbers = st.sampled_from([0.0, 0.5, 0.9, 1.0, 1.0, 1.0])
wrong_numbers = st.sampled_from([-1.0, 3.0, float("nan"), float("inf")])
rarely = st.integers(0, 15).map(lambda drawn: drawn == 0)


@st.composite
def data(draw: st.DrawFn, loss: str) -> Datum:
    """Good data for `loss`, in each part of which something is now and then wrong."""
    length = draw(st.integers(1, 3)) if not draw(rarely) else draw(st.sampled_from([0, 6, 7]))
    names = {*LOSSES[loss].required} if loss in LOSSES else {"target_tokens"}
    if draw(rarely):
        names ^= {draw(st.sampled_from(INPUTS))}
    inputs: dict[str, Any] = {}
    for name in sorted(names):
        size = draw(st.integers(0, 7)) if draw(rarely) else length
        values = draw(st.lists(numbers, min_size=size, max_size=size))
        if values and draw(rarely):
            values[0] = draw(wrong_numbers)
        integers = name == "target_tokens" and not draw(rarely)
        finite = np.nan_to_num(values, nan=VOCAB, posinf=VOCAB)
        inputs[name] = finite.astype(np.int64) if integers else np.array(values, dtype=np.float32)
        if draw(rarely):
            inputs[name] = np.stack([inputs[name]] * 2, axis=-1)
    top = VOCAB if draw(rarely) else VOCAB - 1
    prompt = ModelInput.from_ints([top] * length)
    spans = None
    if not draw(st.integers(0, 3)):
        kind = draw(st.sampled_from([PromptProvenanceSpan, SampledProvenanceSpan, SampledProvenanceSpan]))
        spans = [kind("q", 0, length + draw(rarely))]
    return Datum(prompt, inputs, spans, spans)


@st.composite
def operations(draw: st.DrawFn) -> tuple[str, dict[str, float], list[Datum]]:
    loss = "hinge" if draw(rarely) else draw(st.sampled_from(sorted(LOSSES)))
    config = {}
    if draw(st.booleans()) and loss in LOSSES:
        known = sorted(LOSSES[loss].settings) or ["beta"]
        config = draw(st.dictionaries(st.sampled_from(known), numbers | wrong_numbers, max_size=2))
    return loss, config, draw(st.lists(data(loss), min_size=0 if draw(rarely) else 1, max_size=3))


@given(operations())
@settings(max_examples=600, deadline=None)
def test_validate_agrees_with_what_is_refused(operation: tuple[str, dict[str, float], list[Datum]]) -> None:
    loss, config, batch = operation
    problems = validate(Plan("tiny", [PlannedTrain(batch, loss, config)]), PUBLISHED)
    request = ForwardBackwardRequest(ForwardBackwardInput(batch, loss, dict(config)), "run", 1)
    decoded = decode_train_request(encode_forward_backward(request))
    for index, datum in enumerate(decoded.data):
        # What the sampler recorded is filled in before the check.
        if loss == "stable_reinforce" and "logprobs" not in datum.inputs and datum.loss_fn_input_spans:
            zeros = np.zeros(datum.inputs.get("target_tokens", datum.tokens).shape, np.float32)
            decoded.data[index] = replace(datum, inputs={**datum.inputs, "logprobs": zeros})
    refusal = ""
    try:
        check_batch(decoded, CARD, LIMITS)
    except Invalid as error:
        refusal = str(error)
    event(f"refused: {bool(refusal)}")
    assert bool(problems) == bool(refusal), refusal or [str(problem) for problem in problems]
