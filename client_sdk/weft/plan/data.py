"""What is wrong with the data of a planned `forward_backward`: tokens, lengths, shapes, numbers, the loss and its
settings. Shapes: T tokens of a datum, K targets per position."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from weft.loss_handle import LossHandle
from weft.plan.plan import PlannedTrain, datum_of
from weft.plan.problem import Problem
from weft.plan.spans import span_problems
from weft.runs.chunks import split
from weft.wire.arrays import Array
from weft.wire.error import WireError
from weft.wire.inputs import Datum
from weft.wire.limits import LimitsResponse, LossLimits, ModelLimits
from weft.wire.request_codec import estimate_bytes

#: What a custom loss reads is its own business, but that it needs targets.
CUSTOM = LossLimits(required=["target_tokens"], multi_target=True, other_inputs=True)
#: Its shape is [T, mixture layers, choices].
ROUTES = "routed_experts"
LOW, HIGH = "clip_low_threshold", "clip_high_threshold"


def data_problems(
    step: PlannedTrain, model: ModelLimits | None, limits: LimitsResponse, where: str
) -> Iterator[Problem]:
    """All problems of one step. Without a known `model`, its vocabulary and context are not checked."""
    loss = _loss(step, limits)
    if loss is None:
        known = ", ".join(sorted(limits.losses))
        yield Problem(f"{where}.loss_fn", "the server has no such loss", known, step.loss_fn)
    else:
        yield from _config(step, loss, where)
    if not step.data:
        yield Problem(f"{where}.data", "no data")
    made: list[Datum] = []
    for index, given in enumerate(step.data):
        at = f"{where}.data[{index}]"
        try:
            datum = datum_of(given)
        except (ValueError, KeyError, TypeError) as error:
            yield Problem(at, " ".join(str(error).split()))
            continue
        made.append(datum)
        yield from _datum(datum, loss, model, step.loss_fn_config or {}, at)
        if isinstance(step.loss_fn, LossHandle):
            yield from _reads(step.loss_fn, datum, at)
    yield from _sizes(made, limits, where)


def _reads(handle: LossHandle, datum: Datum, where: str) -> Iterator[Problem]:
    try:
        handle.check([datum])
    except ValueError as error:
        yield Problem(where, str(error).removeprefix("data[0]."))


def _loss(step: PlannedTrain, limits: LimitsResponse) -> LossLimits | None:
    if not isinstance(step.loss_fn, str):
        return CUSTOM
    return limits.losses.get(step.loss_fn)


def _config(step: PlannedTrain, loss: LossLimits, where: str) -> Iterator[Problem]:
    config = step.loss_fn_config or {}
    at = f"{where}.loss_fn_config"
    for key, value in config.items():
        if key not in loss.config:
            takes = ", ".join(sorted(loss.config)) or "none"
            yield Problem(f"{at}[{key!r}]", f"{step.loss_fn} has no such setting", takes, key)
        elif loss.config[key] is not None and (isinstance(value, str) or not math.isfinite(value) or value < 0):
            yield Problem(f"{at}[{key!r}]", "must be a finite number", ">= 0", value)
    low, high = (config.get(key, loss.config.get(key)) for key in (LOW, HIGH))
    if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
        yield Problem(f"{at}[{LOW!r}]", f"above {HIGH}", high, low)


def _datum(
    datum: Datum, loss: LossLimits | None, model: ModelLimits | None, config: Mapping[str, float | str], where: str
) -> Iterator[Problem]:
    tokens = None
    try:
        tokens = np.asarray(datum.model_input.to_ints(), dtype=np.int64)
    except WireError as error:
        yield Problem(f"{where}.model_input", f"the models served read text only: {error}")
    if tokens is not None:
        yield from length_and_ids(tokens, model, f"{where}.model_input")
    inputs = {}
    for name, tensor in datum.loss_fn_inputs.items():
        inputs[name] = np.atleast_1d(tensor.to_numpy())  # on the wire, one without dimensions is one of one element
        yield from _numbers(inputs[name], f"{where}.loss_fn_inputs[{name!r}]")
    if loss is not None:
        yield from _inputs(inputs, loss, config, loss.recorded if datum.loss_fn_input_spans else (), where)
    length = None if tokens is None else tokens.size
    yield from _targets(inputs, loss, model, length, where)
    if ROUTES in inputs and model is not None:
        yield from _routes(inputs[ROUTES], model, length, f"{where}.loss_fn_inputs[{ROUTES!r}]")
    yield from span_problems(datum, inputs, loss, where)


def length_and_ids(tokens: Array, model: ModelLimits | None, where: str) -> Iterator[Problem]:
    """Problems of the tokens of a prompt, int64 [T]."""
    if tokens.size == 0:
        yield Problem(where, "no tokens")
    if model is None:
        return
    if tokens.size > model.context_length:
        yield Problem(where, "longer than the context", model.context_length, int(tokens.size))
    yield from _ids(tokens, model, where)


def _ids(ids: Array, model: ModelLimits | None, where: str) -> Iterator[Problem]:
    """One problem for all tokens out of the vocabulary, which shows the first."""
    if model is None:
        return
    flat = ids.astype(np.int64).reshape(-1)
    bad = np.flatnonzero((flat < 0) | (flat >= model.vocab_size))
    if bad.size:
        what = f"{bad.size} tokens out of the vocabulary, the first at element {int(bad[0])}"
        yield Problem(where, what, f"0 to {model.vocab_size - 1}", int(flat[bad[0]]))


def _numbers(values: Array, where: str) -> Iterator[Problem]:
    bad = np.flatnonzero(~np.isfinite(values.reshape(-1)))
    if bad.size:
        what = f"{bad.size} values that are not finite, the first at element {int(bad[0])}"
        yield Problem(where, what, None, float(values.reshape(-1)[bad[0]]))


def _inputs(
    inputs: Mapping[str, Array],
    loss: LossLimits,
    config: Mapping[str, float | str],
    recorded: Collection[str],
    where: str,
) -> Iterator[Problem]:
    for name in loss.required:
        if name not in inputs and name not in recorded:
            yield Problem(f"{where}.loss_fn_inputs[{name!r}]", "missing: this loss needs it", None, sorted(inputs))
    if loss.other_inputs:
        return
    known = {*loss.required, *loss.optional}
    for name in inputs:
        if name not in known:
            at = f"{where}.loss_fn_inputs[{name!r}]"
            yield Problem(at, "this loss takes no such input", ", ".join(sorted(known)), name)
    for name in (LOW, HIGH):
        if name in inputs and name in config:
            yield Problem(f"{where}.loss_fn_inputs[{name!r}]", "given both per token and in loss_fn_config")
    low, high = (inputs.get(name, config.get(name, loss.config.get(name))) for name in (LOW, HIGH))
    if LOW in inputs or HIGH in inputs:
        bounds = [np.asarray(bound, dtype=np.float64) for bound in (low, high)]
        if bounds[0].size == 1 or bounds[1].size == 1 or bounds[0].shape == bounds[1].shape:
            if (bounds[0] > bounds[1]).any():
                yield Problem(f"{where}.loss_fn_inputs", f"{LOW} is above {HIGH} at some positions")
            if (bounds[0] < 0).any():
                yield Problem(f"{where}.loss_fn_inputs[{LOW!r}]", "negative ratio bound", 0, float(bounds[0].min()))


def _targets(
    inputs: Mapping[str, Array], loss: LossLimits | None, model: ModelLimits | None, length: int | None, where: str
) -> Iterator[Problem]:
    targets = inputs.get("target_tokens")
    if targets is None:
        return
    at = f"{where}.loss_fn_inputs['target_tokens']"
    if targets.dtype.kind not in "iu":
        yield Problem(at, "must be integers", "int64", str(targets.dtype))
        return
    yield from _ids(targets, model, at)
    if targets.ndim != 1 and not (targets.ndim == 2 and (loss is None or loss.multi_target)):
        yield Problem(
            at,
            "wrong number of dimensions",
            "[T] or [T, K]" if loss and loss.multi_target else "[T]",
            list(targets.shape),
        )
    elif length is not None and targets.shape[0] != length:
        yield Problem(at, "must have as many positions as the model input tokens", length, targets.shape[0])
    elif targets.size == 0 and targets.shape[0]:
        yield Problem(at, "no target at any position", "[T, K] with K of at least 1", list(targets.shape))
    for name, values in inputs.items():
        if not (loss and loss.other_inputs) and name not in ("target_tokens", ROUTES) and values.shape != targets.shape:
            other = f"{where}.loss_fn_inputs[{name!r}]"
            yield Problem(other, "another shape than target_tokens", list(targets.shape), list(values.shape))


def _routes(routes: Array, model: ModelLimits, length: int | None, where: str) -> Iterator[Problem]:
    """Problems of a replayed routing, int64 [T, mixture layers, choices]."""
    experts, layers, choices = model.num_experts, model.mixture_layers, model.experts_per_token
    if experts is None or layers is None or choices is None:
        return
    if experts == 0:
        yield Problem(where, "this model has no experts")
        return
    if routes.dtype.kind not in "iu":
        yield Problem(where, "must be integers", "int64", str(routes.dtype))
        return
    shape = (routes.shape[0] if length is None else length, layers, choices)
    if routes.shape != shape:
        yield Problem(where, "must be [tokens, mixture layers, choices]", list(shape), list(routes.shape))
        return
    chosen = routes.astype(np.int64)
    free = (chosen == -1).all(axis=2, keepdims=True)
    bad = np.flatnonzero((~free & ((chosen < 0) | (chosen >= experts))).any(axis=(1, 2)))
    if bad.size:
        what = f"neither experts nor -1 in all choices of a layer, at {bad.size} tokens, the first {int(bad[0])}"
        yield Problem(where, what, f"0 to {experts - 1}", chosen[bad[0]].tolist())


def _sizes(data: list[Datum], limits: LimitsResponse, where: str) -> Iterator[Problem]:
    """What does not fit into one request, after the client has cut the data."""
    for index, size in enumerate(estimate_bytes(data)):
        if limits.max_body_bytes is not None and size > limits.max_body_bytes:
            yield Problem(f"{where}.data[{index}]", "too many bytes for one request", limits.max_body_bytes, size)
    most = limits.max_tokens_per_op
    for part in split(data, limits.chunk_data, limits.chunk_bytes):
        tokens = sum(sum(len(getattr(chunk, "tokens", ())) for chunk in datum.model_input.chunks) for datum in part)
        if most is not None and tokens > most:
            yield Problem(f"{where}.data", "too many tokens in one request of the cut data", most, tokens)
