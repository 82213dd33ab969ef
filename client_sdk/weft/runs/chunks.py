"""Large operations go over the wire in parts; here they are cut, and their results joined. Pure functions.

A metric is called `name:reduction`, and the reduction says how the parts' values join. mean and slack are weighted by
what they are over: the number of data in each part for those of an uploaded loss, else the positions in the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.errors import APIResponseValidationError
from weft.wire.binary.request_codec import estimate_bytes
from weft.wire.inputs import Datum
from weft.wire.training import ForwardBackwardOutput


def split(data: Sequence[Datum], max_data: int, max_bytes: int) -> list[list[Datum]]:
    """Cut `data`, in order, into parts of at most `max_data` data and about `max_bytes` bytes; none is empty.

    A datum larger than `max_bytes` is a part of its own.
    """
    parts: list[list[Datum]] = []
    filled = 0
    for datum, size in zip(data, estimate_bytes(data), strict=True):
        if not parts or len(parts[-1]) >= max_data or filled + size > max_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(datum)
        filled += size
    return parts


Reduce = Callable[[list[float], list[float]], float]


def _mean(values: list[float], weights: list[float]) -> float:
    if not sum(weights):
        return sum(values) / len(values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


#: `unique` is not here: its values are kept apart, under numbered names.
REDUCTIONS: dict[str, Reduce] = {
    "sum": lambda values, _: sum(values),
    "min": lambda values, _: min(values),
    "max": lambda values, _: max(values),
    "mean": _mean,
    "slack": lambda values, weights: max(values) - _mean(values, weights),
    "hash2": lambda values, _: float(sum(int(value) % 2**64 for value in values) % 2**64),
}


def join(parts: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """The result of an operation from those of its parts, in the order of its data.

    A metric that a part lacks, or whose reduction is unknown, is left out.
    """
    data = [float(len(part.loss_fn_outputs)) for part in parts]
    tokens = [part.metrics.get("tokens:sum", 0.0) for part in parts]
    metrics: dict[str, float] = {}
    for key in parts[0].metrics:
        values = [part.metrics[key] for part in parts if key in part.metrics]
        if len(values) == len(parts):
            by_data = key.startswith("custom/") or not any(tokens)
            metrics.update(_join_metric(key, values, data if by_data else tokens))
    outputs = [output for part in parts for output in part.loss_fn_outputs]
    return ForwardBackwardOutput(parts[0].loss_fn_output_type, outputs, metrics)


def _join_metric(key: str, values: list[float], weights: list[float]) -> dict[str, float]:
    name, colon, reduction = key.partition(":")
    if not name or not colon or ":" in reduction:
        raise APIResponseValidationError(f"metric {key!r} is not of the form name:reduction")
    if reduction == "unique":
        return {key if index == 0 else f"{key}_{index}": value for index, value in enumerate(values)}
    reduce = REDUCTIONS.get(reduction)
    return {} if reduce is None else {key: reduce(values, weights)}
