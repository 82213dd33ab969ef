"""What is wrong with a forward or forward_backward.

Whatever would make a worker fail is found here, so that a bad datum costs its sender an error and costs nobody else any
compute. Each rule looks at all data at once, and at single data only where something is wrong: a good batch costs a few
comparisons of whole arrays. A rule does not repeat a problem that another rule has reported. Shapes: T tokens of a
datum, K targets per position.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.wire.account.limits import LimitsResponse, LossLimits, ModelLimits
from weft.wire.binary.arrays import Array
from weft.wire.binary.train_codec import ArrayDatum, TrainBatch
from weft.wire.checks.losses import CUSTOM, OF_THE_FORWARD, RATIO_MASK, ROUTES, TEMPERATURE, THRESHOLDS, loss_id_of
from weft.wire.checks.problem import Problem
from weft.wire.checks.provenance import span_problems

#: The index of the datum that `where` is a part of; None if it is a part of the whole operation.
Found = tuple[int | None, Problem]

#: Small arrays are joined to about this many elements, and looked at together.
BLOCK = 2**16

LOW, HIGH = THRESHOLDS
TARGETS = "target_tokens"

#: Stands in for an unknown loss, so that the rest can be checked.
_ANY = LossLimits(required=[], multi_target=True, other_inputs=True)


@dataclass(frozen=True)
class Reads:
    """The inputs that the custom loss `name` reads from every datum, as (input, rank); `logprobs` are shaped as the
    targets."""

    name: str
    inputs: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class BatchRules:
    """The rules that a batch is checked against. Without a `model`, nothing is checked against its vocabulary, context
    and experts; `reads` are the inputs of the batch's custom loss, if known."""

    losses: Mapping[str, LossLimits]
    model: ModelLimits | None = None
    model_name: str = "this model"
    reads: Reads | None = None


def batch_problems(batch: TrainBatch, rules: BatchRules) -> Iterator[Found]:
    """All problems of a batch, rule by rule."""
    data, model = batch.data, rules.model
    if not data:
        yield None, Problem("data", "empty; send at least one datum")
    yield from _lengths(data, model, rules.model_name)
    yield from _ids([datum.tokens for datum in data], model, "model_input", "model_input")
    loss = rules.losses.get(batch.loss_fn)
    if loss is None:
        known = ", ".join(sorted(rules.losses))
        what = f"unknown loss_fn {batch.loss_fn!r}; this server has {known}"
        yield None, Problem("loss_fn", what, known, batch.loss_fn)
    else:
        for problem in config_problems(batch.loss_fn, loss, batch.loss_fn_config):
            yield None, problem
    loss = loss or _ANY
    reads = rules.reads if loss.other_inputs else None
    required, accepted = set(loss.required), loss.accepted
    for index, datum in enumerate(data):
        named = required <= datum.inputs.keys() and (loss.other_inputs or datum.inputs.keys() <= accepted)
        for problem in () if named or reads else _names(datum, batch.loss_fn, loss):
            yield index, problem
        for problem in _datum(datum, batch, loss, reads):
            yield index, problem
    yield from _numbers(data, loss, reads)
    for index, datum in enumerate(data):
        for problem in _routes(datum, model) if ROUTES in datum.inputs else ():
            yield index, problem
        for problem in _temperatures(datum, loss) if TEMPERATURE in datum.inputs else ():
            yield index, problem
        for problem in span_problems(datum, loss, batch.loss_fn):
            yield index, problem
    integers = [datum.inputs.get(TARGETS, _NONE) for datum in data]
    yield from _ids([ids if ids.dtype.kind in "iu" else _NONE for ids in integers], model, TARGETS, _input(TARGETS))


def refusal(found: Found) -> str:
    """A problem as an error text. Sentences about a datum or a loss already name their field."""
    index, problem = found
    if index is not None:
        return f"datum {index}: {problem.what}"
    return problem.what if problem.where.startswith("loss_fn") else f"{problem.where}: {problem.what}"


def size_problems(lengths: Sequence[int], limits: LimitsResponse) -> Iterator[Problem]:
    """Problems of the size of one request, of data with these `lengths` in tokens."""
    most = limits.max_data
    if most is not None and len(lengths) > most:
        what = f"{len(lengths)} data, the limit is {most} per operation: send several"
        yield Problem("data", what, most, len(lengths))
    most, tokens = limits.max_tokens_per_op, sum(lengths)
    if most is not None and tokens > most:
        yield Problem("data", f"{tokens} tokens, the limit is {most} per operation", most, tokens)


def config_problems(loss_fn: str, loss: LossLimits, config: Mapping[str, float | str]) -> Iterator[Problem]:
    """Problems of the settings of a loss."""
    if loss_fn == CUSTOM:
        if loss_id_of(config) is None:
            what = f"loss_fn_config of a custom loss is its loss_id alone, a text; got {dict(config)!r:.200}"
            yield Problem("loss_fn_config", what, None, dict(config))
        return
    for key, value in config.items():
        where = f"loss_fn_config[{key!r}]"
        if key not in loss.config:
            takes = ", ".join(loss.config) or "none"
            yield Problem(where, f"unknown loss_fn_config key {key!r}: {loss_fn} takes {takes}", takes, key)
        elif loss.config[key] is not None and not _bounds(value):
            yield Problem(where, f"loss_fn_config {key!r} must be a finite number >= 0, got {value!r}", ">= 0", value)
    low, high = (config.get(key, loss.config.get(key)) for key in THRESHOLDS)
    if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
        what = f"loss_fn_config: {LOW} {low} is above {HIGH} {high}"
        yield Problem(f"loss_fn_config[{LOW!r}]", what, high, low)


def _bounds(value: Any) -> bool:
    """True if the value is a number that a setting may have: finite and not negative. Its type has not been checked
    yet."""
    return not isinstance(value, str | bool | np.bool_) and hasattr(value, "__float__") and 0 <= float(value) < math.inf


_NONE: Array = np.zeros(0, np.int64)


def _input(name: str) -> str:
    return f"loss_fn_inputs[{name!r}]"


def _lengths(data: Sequence[ArrayDatum], model: ModelLimits | None, name: str) -> Iterator[Found]:
    longest = math.inf if model is None else model.context_length
    for index, datum in enumerate(data):
        length = len(datum.tokens)
        if length == 0:
            yield index, Problem("model_input", "model_input is empty; it needs at least one token")
        elif length > longest:
            what = f"model_input has {length} tokens, the limit of {name} is {longest}"
            yield index, Problem("model_input", what, longest, length)


def _blocks(arrays: Iterable[Array]) -> Iterator[Array]:
    """The elements of all arrays, flat, in a few arrays."""
    held: list[Array] = []
    size = 0
    for array in arrays:
        held.append(array.reshape(-1))
        size += array.size
        if size >= BLOCK:
            yield held[0] if len(held) == 1 else np.concatenate(held)
            held, size = [], 0
    if size:
        yield np.concatenate(held)


def _ids(arrays: Sequence[Array], model: ModelLimits | None, field: str, where: str) -> Iterator[Found]:
    """Token ids beyond the vocabulary: one problem for each datum, which names the first."""
    if model is None or all(int(ids.min()) >= 0 and int(ids.max()) < model.vocab_size for ids in _blocks(arrays)):
        return
    for index, array in enumerate(arrays):
        ids = array.reshape(-1).astype(np.int64)
        bad = np.flatnonzero((ids < 0) | (ids >= model.vocab_size))
        if bad.size:
            token, limit = int(ids[bad[0]]), f"0 to {model.vocab_size - 1}"
            what = f"{field} holds token {token} at position {int(bad[0])}; this model's tokens are {limit}"
            yield index, Problem(where, what, limit, token)


def _numbers(data: Sequence[ArrayDatum], loss: LossLimits, reads: Reads | None) -> Iterator[Found]:
    """Values that are not finite, in the inputs that the loss reads; in all inputs if the loss is unknown."""
    whatever = loss is _ANY or not loss.other_inputs
    read = {name for name, _ in reads.inputs[1:]} if reads else set()
    columns: dict[str, list[tuple[int, Array]]] = {}
    for index, datum in enumerate(data):
        for name, values in datum.inputs.items():
            if values.dtype.kind == "f" and (name in read or whatever):
                columns.setdefault(name, []).append((index, values))
    for name, column in columns.items():
        if all(np.isfinite(block).all() for block in _blocks(values for _, values in column)):
            continue
        for index, values in column:
            bad = np.flatnonzero(~np.isfinite(values.reshape(-1)))
            if bad.size:
                value: Any = values.reshape(-1)[bad[0]]
                what = f"{name!r} is {value} at element {int(bad[0])}; it must be finite"
                yield index, Problem(_input(name), what, None, float(value))


def _datum(datum: ArrayDatum, batch: TrainBatch, loss: LossLimits, reads: Reads | None) -> Iterator[Problem]:
    """Problems of the inputs of one datum: their shapes, and what must agree between them."""
    inputs = datum.inputs
    if reads is not None:
        yield from custom_problems(reads, inputs)
    targets = inputs.get(TARGETS)
    if targets is None:
        return
    yield from _targets(targets, len(datum.tokens), batch.loss_fn, loss)
    if loss.other_inputs:
        return
    for name, values in inputs.items():
        if values.shape != targets.shape and name not in OF_THE_FORWARD:
            what = f"{name!r} has shape {values.shape}, {TARGETS} has {targets.shape}"
            yield Problem(_input(name), what, targets.shape, values.shape)
    if LOW in inputs or HIGH in inputs:
        yield from _thresholds(inputs, loss, batch.loss_fn_config)
    if RATIO_MASK in loss.required and {RATIO_MASK, "advantages"} <= inputs.keys():
        marked, advantages = inputs[RATIO_MASK], inputs["advantages"]
        if not marked.any() and advantages.any():
            what = f"{RATIO_MASK!r} marks no position, but some advantages are not 0"
            yield Problem(_input(RATIO_MASK), what)


def custom_problems(reads: Reads, inputs: Mapping[str, Array]) -> Iterator[Problem]:
    """A datum must have what a custom loss reads, each of the declared rank."""
    for name, rank in reads.inputs:
        key = TARGETS if name == "logprobs" else name
        found = inputs.get(key)
        if found is None:
            what = f"the loss {reads.name!r} reads {key!r}; it has {sorted(inputs)}"
            yield Problem(_input(key), what, None, sorted(inputs))
        # On the wire a scalar has no shape: it comes as one value.
        elif found.ndim != rank and not (rank == 0 and found.size == 1):
            what = f"{key!r} has shape {found.shape}, the loss {reads.name!r} declared rank {rank}"
            yield Problem(_input(key), what, rank, found.ndim)


def _names(datum: ArrayDatum, loss_fn: str, loss: LossLimits) -> Iterator[Problem]:
    """Inputs that are missing, or that the loss does not take."""
    inputs = datum.inputs
    for name in loss.required:
        if name in inputs or (name in loss.recorded and datum.loss_fn_input_spans):
            continue
        what = f"{loss_fn} needs the input {name!r}; it has {sorted(inputs)}"
        if name in loss.recorded:
            what = (
                f"{loss_fn} needs the input {name!r}, or provenance spans that name sequences sampled with "
                "record_stability_info"
            )
        yield Problem(_input(name), what, None, sorted(inputs))
    for name in inputs:
        if name not in loss.accepted and not loss.other_inputs:
            takes = ", ".join(sorted(loss.accepted))
            yield Problem(_input(name), f"unknown input {name!r}: {loss_fn} takes {takes}", takes, name)


def _targets(targets: Array, length: int, loss_fn: str, loss: LossLimits) -> Iterator[Problem]:
    where = _input(TARGETS)
    if targets.dtype.kind not in "iu":
        yield Problem(where, f"{TARGETS!r} must be integers, got {targets.dtype}", "int64", str(targets.dtype))
    elif targets.ndim != 1 and not (loss.multi_target and targets.ndim == 2):
        shapes = "[N] or [N, K]" if loss.multi_target else "[N]"
        what = f"{TARGETS!r} of {loss_fn} must have shape {shapes}, got {targets.shape}"
        yield Problem(where, what, shapes, targets.shape)
    elif targets.size == 0 and length:
        yield Problem(where, f"{TARGETS!r} is empty")
    elif targets.shape[0] != length:
        what = f"{TARGETS!r} has {targets.shape[0]} positions, the model input {length} tokens"
        yield Problem(where, what, length, targets.shape[0])


def _thresholds(inputs: Mapping[str, Array], loss: LossLimits, config: Mapping[str, float | str]) -> Iterator[Problem]:
    """Problems of the clip bounds given per token; a bound that is not given per token is the config's, or the loss's
    default."""
    bounds: list[Array] = []
    for name in THRESHOLDS:
        if name in inputs and name in config:
            yield Problem(_input(name), f"{name!r} is given both in loss_fn_config and per token")
        bound = config.get(name, loss.config.get(name))
        values = inputs.get(name, np.asarray(bound if isinstance(bound, int | float) else math.nan))
        bounds.append(values)
    low, high = bounds
    if (low.astype(np.float64) < 0).any():
        what = f"{LOW!r} holds the negative ratio bound {low.min()}"
        yield Problem(_input(LOW), what, 0, float(low.min()))
    comparable = not low.ndim or not high.ndim or low.shape == high.shape
    if comparable and (low.astype(np.float64) > high.astype(np.float64)).any():
        yield Problem("loss_fn_inputs", f"{LOW!r} is above {HIGH!r} at some positions")


def _temperatures(datum: ArrayDatum, loss: LossLimits) -> Iterator[Problem]:
    """Problems of the temperatures that a datum was sampled at: one value, or one for each of its T positions."""
    values, where, length = datum.inputs[TEMPERATURE], _input(TEMPERATURE), len(datum.tokens)
    if values.size != 1 and values.shape != (length,):
        what = f"{TEMPERATURE!r} has shape {values.shape}; it needs one value, or one for each position ({length},)"
        yield Problem(where, what, (length,), values.shape)
        return
    numbers = values.reshape(-1).astype(np.float64)
    # for other losses, `_numbers` reports values that are not finite
    known = np.isfinite(numbers) | (not loss.other_inputs)
    bad = np.flatnonzero((numbers <= 0) | ~known)
    if bad.size:
        value = float(numbers[bad[0]])
        what = (
            f"{TEMPERATURE!r} is {value} at element {int(bad[0])}; it must be a finite number above 0 (tokens drawn at "
            "0 are the likeliest ones, not a sample)"
        )
        yield Problem(where, what, "> 0", value)


def _routes(datum: ArrayDatum, model: ModelLimits | None) -> Iterator[Problem]:
    """Problems of a replayed routing, int64 [T, mixture layers, choices]."""
    routes = datum.inputs[ROUTES]
    if model is None:
        return
    experts, layers, choices = model.num_experts, model.mixture_layers, model.experts_per_token
    if experts is None or layers is None or choices is None:
        return
    where, shape = _input(ROUTES), (len(datum.tokens), layers, choices)
    if not experts:
        yield Problem(where, f"{ROUTES!r}: this model has no experts")
    elif routes.shape != shape:
        what = f"{ROUTES!r} has shape {routes.shape}; it needs [tokens, mixture layers, choices] {shape}"
        yield Problem(where, what, shape, routes.shape)
    elif routes.dtype.kind not in "iu":
        yield Problem(where, f"{ROUTES!r} must be integers, got {routes.dtype}", "int64", str(routes.dtype))
    else:
        chosen = routes.astype(np.int64)
        free = (chosen == -1).all(axis=2, keepdims=True)
        bad = np.flatnonzero((~free & ((chosen < 0) | (chosen >= experts))).any(axis=(1, 2)))
        if bad.size:
            what = (
                f"{ROUTES!r} at token {int(bad[0])}: every choice is an expert 0 to {experts - 1}, or all of a layer "
                "are -1, which leaves them to the router"
            )
            yield Problem(where, what, f"0 to {experts - 1}", chosen[bad[0]].tolist())
