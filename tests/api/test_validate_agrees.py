"""The client's `validate` and the server's check of data: what is held against the rules, and what was once found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings, strategies as st
from weft import Datum, ModelInput, Plan, PlannedTrain
from weft.plan.validate import validate
from weft.types import EncodedTextChunk, ImageChunk, PromptProvenanceSpan, SampledProvenanceSpan, TensorData
from weft.wire.binary.request_codec import as_decoded, encode_forward_backward
from weft.wire.binary.train_codec import ArrayDatum, decode_train_request
from weft.wire.checks.losses import LOSSES, ROUTES
from weft.wire.error import WireError
from weft.wire.training import ForwardBackwardInput, ForwardBackwardRequest

from api.checks.batches import check_batch
from api.checks.limits import limits_of
from api.errors import Invalid
from store.settings import Limits
from tests.search import examples
from workers.model.card import read_card
from workers.model.tiny import TINY_PATH

VOCAB, CONTEXT = 20, 6
_CARD = read_card("tiny", TINY_PATH)
CARD = replace(_CARD, config=replace(_CARD.config, vocab_size=VOCAB, context_length=CONTEXT))
LIMITS = Limits(max_tokens_per_op=12)
PUBLISHED = limits_of({"tiny": CARD}, LIMITS)

INPUTS = sorted(set().union(*(spec.accepted for spec in LOSSES.values())))
LAYERS, CHOICES, EXPERTS = len(CARD.config.mixture_layers), CARD.config.experts_per_token, CARD.config.num_experts
numbers = st.sampled_from([0.0, 0.5, 0.9, 1.0, 1.0, 1.0])
wrong_numbers = st.sampled_from([-1.0, 3.0, float("nan"), float("inf")])
rarely = st.integers(0, 15).map(lambda drawn: drawn == 0)
#: Settings and elements of arrays that are mostly wrong.
odd_numbers = st.sampled_from([float("nan"), float("inf"), -float("inf"), -1, 0, 19, 20, 2.0**31, 2.0**53, 1e300])
dtypes = st.sampled_from(["int64", "int32", "uint8", "bool", "float32", "float64", "float16"])


@st.composite
def shapes(draw: st.DrawFn, length: int) -> tuple[int, ...]:
    """The shape of an input with that many tokens: nearly the right one, or empty in some dimension."""
    sizes = st.sampled_from([length, length, 0, 1, 2, LAYERS, CHOICES])
    return tuple(draw(st.lists(sizes, min_size=0, max_size=3)))


@st.composite
def arrays(draw: st.DrawFn, length: int) -> Any:
    """Any array that can be sent."""
    shape, dtype = draw(shapes(length)), draw(dtypes)
    values = np.full(shape, draw(numbers | odd_numbers), np.float64)
    if values.size and draw(st.booleans()):
        values.reshape(-1)[-1] = draw(odd_numbers)
    kind = np.dtype(dtype).kind
    values = np.clip(np.nan_to_num(values), -(2.0**31), 2.0**53) if kind in "iub" else values
    with np.errstate(all="ignore"):
        array = np.asarray(values).astype(dtype)
    return TensorData.from_dense(array) if draw(st.booleans()) else array


@st.composite
def routes(draw: st.DrawFn, length: int) -> Any:
    """`routed_experts` as it should be, now and then with one wrong element."""
    values = np.full((length, LAYERS, CHOICES), draw(st.sampled_from([0, EXPERTS - 1, -1])))
    if values.size and draw(st.booleans()):
        values.reshape(-1)[draw(st.integers(0, values.size - 1))] = draw(st.sampled_from([-2, -1, 0, EXPERTS]))
    return values


@st.composite
def spans(draw: st.DrawFn, length: int) -> list[PromptProvenanceSpan | SampledProvenanceSpan]:
    """Spans, mostly of a prompt and of what was sampled after it."""
    prompt = draw(st.sampled_from([0, 0, 1, length]))
    lengths = [prompt, length - prompt] if not draw(rarely) else draw(st.lists(st.integers(-1, 3), max_size=3))
    kinds = [PromptProvenanceSpan, SampledProvenanceSpan, PromptProvenanceSpan]
    name, offset = ("q", 0) if not draw(rarely) else draw(st.sampled_from([("", 0), ("q", -1), ("q", 2**40)]))
    return [kind(name, offset, size) for kind, size in zip(kinds, lengths, strict=False)]


@st.composite
def data(draw: st.DrawFn, loss: str) -> Datum:
    """Good data for `loss`, each part of which is now and then wrong."""
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
    if draw(st.integers(0, 3)) == 3:
        inputs[ROUTES] = draw(routes(length))
    if draw(st.integers(0, 7)) == 7:
        inputs[draw(st.sampled_from(sorted(inputs) or [ROUTES]))] = draw(arrays(length))
    if draw(rarely) and "target_tokens" in inputs:  # all of one odd shape
        shape = draw(shapes(length))
        inputs = {name: np.zeros(shape, np.int64 if name == "target_tokens" else np.float32) for name in inputs}
    top = VOCAB if draw(rarely) else VOCAB - 1
    prompt = ModelInput.from_ints([top] * length)
    if draw(rarely):
        text, picture = EncodedTextChunk(tokens=[1] * length), ImageChunk(data=b"", format="png")
        prompt = ModelInput(chunks=draw(st.lists(st.sampled_from([text, picture, EncodedTextChunk(tokens=[])]))))
    origin = None
    if not draw(st.integers(0, 3)):
        origin = draw(spans(length))
    return Datum(prompt, inputs, origin, origin if not draw(rarely) or origin is None else draw(spans(length)))


@st.composite
def operations(draw: st.DrawFn) -> tuple[str, dict[str, Any], list[Datum]]:
    loss = "hinge" if draw(rarely) else draw(st.sampled_from(sorted(LOSSES)))
    config: dict[str, Any] = {}
    if draw(st.booleans()) and loss in LOSSES:
        known = sorted(LOSSES[loss].config) or ["beta"]
        config = draw(st.dictionaries(st.sampled_from(known), numbers | wrong_numbers, max_size=2))
        if draw(rarely):
            config[draw(st.sampled_from([*known, "gamma", ""]))] = draw(odd_numbers | st.sampled_from(["", "1", "a"]))
    return loss, config, draw(st.lists(data(loss), min_size=0 if draw(rarely) else 1, max_size=3))


def sent(given: Datum) -> ArrayDatum:
    """The datum as the server decodes it. Raises `WireError` if it cannot be read."""
    request = ForwardBackwardRequest(ForwardBackwardInput([given], "cross_entropy", {}), "run", 1)
    return decode_train_request(encode_forward_backward(request)).data[0]


def content(given: Datum, read: Callable[[Datum], ArrayDatum]) -> Any:
    """A datum as lists that can be compared; None for one that cannot be read."""
    try:
        made = read(given)
    except WireError:
        return None
    arrays = {name: (str(array.dtype), array.shape, array.tobytes()) for name, array in made.inputs.items()}
    return made.tokens.tolist(), arrays, made.model_input_spans, made.loss_fn_input_spans


def refused(loss: str, config: dict[str, Any], batch: list[Datum]) -> str:
    """The server's reasons to refuse this; empty if it accepts."""
    request = ForwardBackwardRequest(ForwardBackwardInput(batch, loss, dict(config)), "run", 1)
    try:
        check_batch(decode_train_request(encode_forward_backward(request)), PUBLISHED, "tiny")
    except (Invalid, WireError) as error:
        return str(error)
    return ""


def check_agreement(loss: str, config: dict[str, Any], batch: list[Datum]) -> bool:
    """Whether the server refuses this. The client must list it, in the same words where all can be decoded. The rules
    are one code: both agree where they look at the same arrays."""
    read = [content(datum, sent) for datum in batch]
    assert [content(datum, as_decoded) for datum in batch] == read
    problems = validate(Plan("tiny", [PlannedTrain(batch, loss, config)]), PUBLISHED)
    refusal = refused(loss, config, batch)
    assert bool(problems) == bool(refusal), refusal or [str(problem) for problem in problems]
    if refusal and None not in read:
        assert any(problem.what in refusal for problem in problems), (refusal, problems)
    return bool(refusal)


@given(operations())
@settings(max_examples=examples(250), deadline=None)
def test_validate_agrees_with_what_is_refused(operation: tuple[str, dict[str, Any], list[Datum]]) -> None:
    event(f"refused: {check_agreement(*operation)}")


def datum(length: int = 2, origin: Any = None, **inputs: Any) -> Datum:
    """A datum that is good for cross_entropy, except for the arguments."""
    good = {"target_tokens": np.ones(length, np.int64), "weights": np.ones(length, np.float32)}
    mine, targets = origin if isinstance(origin, tuple) else (origin, origin)
    return Datum(ModelInput.from_ints([1] * length), good | inputs, mine, targets)


def routed(*shape: int, fill: int = 0, last: int = 0, dtype: str = "int64") -> Datum:
    """`routed_experts` of this shape, with another last element."""
    values = np.full(shape, fill)
    values.reshape(-1)[-1:] = last
    return datum(**{ROUTES: values.astype(dtype)})


def span(length: int, offset: int = 0, name: str = "q") -> SampledProvenanceSpan:
    return SampledProvenanceSpan(name, offset, length)


#: Everything that the search has ever found, and similar cases: a datum, and whether the server refuses it.
FOUND = {
    "routes-empty": (routed(0, 2), True),
    "routes-none": (routed(0), True),
    "routes-of-no-token": (routed(0, LAYERS, CHOICES), True),
    "routes-of-no-layer": (routed(2, 0, CHOICES), True),
    "routes-of-tokens": (routed(2), True),
    "routes-of-one-layer": (routed(2, CHOICES), True),
    "routes-of-more-tokens": (routed(3, LAYERS, CHOICES), True),
    "routes-as-floats": (routed(2, LAYERS, CHOICES, dtype="float32"), True),
    "routes-to-no-expert": (routed(2, LAYERS, CHOICES, last=EXPERTS), True),
    "routes-below-none": (routed(2, LAYERS, CHOICES, last=-2), True),
    "routes-free-in-part": (routed(2, LAYERS, CHOICES, last=-1), True),
    "routes-free": (routed(2, LAYERS, CHOICES, fill=-1, last=-1), False),
    "routes": (routed(2, LAYERS, CHOICES, last=EXPERTS - 1), False),
    "no-targets-per-position": (
        datum(target_tokens=np.ones((2, 0), np.int64), weights=np.ones((2, 0), np.float32)),
        True,
    ),
    "no-dimensions": (datum(1, target_tokens=np.array(1), weights=np.array(1.0)), False),
    "no-dimensions-of-two": (datum(2, target_tokens=np.array(1), weights=np.array(1.0)), True),
    "no-spans": (datum(origin=[]), False),
    "spans-of-one-side": (datum(origin=([], [span(2)])), True),
    "spans-below-zero": (datum(origin=[span(3), span(-1)]), True),
    "a-span-before-the-start": (datum(origin=[span(2, offset=-1)]), True),
    "a-span-of-nothing": (datum(origin=[span(2, name="")]), True),
}


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("loss", ["cross_entropy", "stable_reinforce"])
def test_what_was_found(name: str, loss: str) -> None:
    found, wrong = FOUND[name]
    if loss == "stable_reinforce":
        targets = found.loss_fn_inputs["target_tokens"].to_numpy()
        rl = {key: np.ones(targets.shape, np.float32) for key in ("logprobs", "advantages")}
        inputs = {key: value for key, value in found.loss_fn_inputs.items() if key != "weights"} | rl
        found = replace(found, loss_fn_inputs=inputs)
    assert check_agreement(loss, {}, [datum() if loss == "cross_entropy" else found, found]) == wrong
