"""The result sizes of operations that only rearrange or repeat elements (see `custom_rules`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from weft.wire.checks.custom_shapes import (
    Given,
    Shape,
    Unfit,
    as_sizes,
    broadcast,
    dim_given,
    dim_of,
    dims_given,
    known,
    with_size,
)


def unsqueeze(given: Given) -> Shape:
    shape: Shape = given["input"]
    dim = dim_of(given["dim"], len(shape.dims) + 1)
    return replace(shape, dims=(*shape.dims[:dim], 1, *shape.dims[dim:]))


def squeeze(given: Given) -> Shape:
    shape, dims = known(given["input"]), dims_given(given)
    return replace(shape, dims=tuple(size for at, size in enumerate(shape.dims) if not (at in dims and size == 1)))


def reshape(given: Given) -> Shape:
    shape: Shape = given["input"]
    dims = list(as_sizes(given["shape"]))
    if dims == [-1]:
        return replace(shape, dims=(shape.elements,))
    known(shape)
    if -1 in dims:
        rest = math.prod(size for size in dims if size != -1)
        dims[dims.index(-1)] = shape.elements // rest if rest else 0
    if math.prod(dims) != shape.elements or any(size < 0 for size in dims):
        raise Unfit(f"shape {list(shape.dims)} cannot become {list(as_sizes(given['shape']))[:8]}")
    return replace(shape, dims=tuple(dims))


def flatten(given: Given) -> Shape:
    shape: Shape = given["input"]
    count = len(shape.dims)
    first, last = (dim_of(given.get(name, other), count) for name, other in (("start_dim", 0), ("end_dim", -1)))
    if first > last:
        raise Unfit("start_dim is behind end_dim")
    return replace(shape, dims=(*shape.dims[:first], math.prod(shape.dims[first : last + 1]), *shape.dims[last + 1 :]))


def unflatten(given: Given) -> Shape:
    shape, dim = known(given["input"]), dim_given(given)
    if not shape.dims:
        raise Unfit("a scalar has no dimension")
    part = reshape({"input": Shape((shape.dims[dim],)), "shape": given["sizes"]})
    return replace(shape, dims=(*shape.dims[:dim], *part.dims, *shape.dims[dim + 1 :]))


def _ordered(shape: Shape, order: Sequence[int]) -> Shape:
    if sorted(order) != list(range(len(shape.dims))):
        raise Unfit(f"dimensions {list(order)[:8]} of shape {list(shape.dims)}")
    return replace(shape, dims=tuple(shape.dims[at] for at in order))


def transpose(given: Given) -> Shape:
    """Swap the two given dimensions, or else the last two, if there are two."""
    shape: Shape = given["input"]
    order = list(range(len(shape.dims)))
    if len(order) < 2 and "dim0" not in given:
        return shape
    first, second = (dim_of(given.get(name, other), len(order)) for name, other in (("dim0", -2), ("dim1", -1)))
    if order:
        order[first], order[second] = order[second], order[first]
    return _ordered(shape, order)


def permute(given: Given) -> Shape:
    shape: Shape = given["input"]
    return _ordered(shape, [dim_of(each, len(shape.dims)) for each in as_sizes(given["dims"])])


def movedim(given: Given) -> Shape:
    shape: Shape = given["input"]
    source, destination = (dim_of(given[name], len(shape.dims)) for name in ("source", "destination"))
    order = [at for at in range(len(shape.dims)) if at != source]
    if shape.dims:
        order.insert(destination, source)
    return _ordered(shape, order)


def narrow(given: Given) -> Shape:
    shape, dim, length = given["input"], dim_given(given), given["length"]
    if not shape.dims or not 0 <= length <= shape.dims[dim]:
        raise Unfit(f"{length} elements from {given['start']} on, of shape {list(shape.dims)}")
    return with_size(shape, dim, length)


def select(given: Given) -> Shape:
    shape: Shape = given["input"]
    dim = dim_given(given)
    return replace(shape, dims=_without(shape, dim, given["index"]))


def _without(shape: Shape, dim: int, index: int) -> tuple[int, ...]:
    size = shape.dims[dim] if shape.dims else 0
    if not -size <= index < size:
        raise Unfit(f"index {index} of a dimension of {size}")
    return (*shape.dims[:dim], *shape.dims[dim + 1 :])


def expand(given: Given) -> Shape:
    shape, sizes = known(given["input"]), list(as_sizes(given["size"]))
    lead = len(sizes) - len(shape.dims)
    if lead < 0 or any(size < (-1 if at >= lead else 0) for at, size in enumerate(sizes)):
        raise Unfit(f"shape {list(shape.dims)} cannot become {sizes[:8]}")
    whole = [shape.dims[at - lead] if size == -1 else size for at, size in enumerate(sizes)]
    if broadcast([shape, Shape(tuple(whole))]) != tuple(whole):
        raise Unfit(f"shape {list(shape.dims)} cannot become {sizes[:8]}")
    return replace(shape, dims=tuple(whole))


def repeat(given: Given) -> Shape:
    shape: Shape = given["input"]
    times = as_sizes(given["repeats"] if "repeats" in given else given["dims"])
    if "repeats" in given and len(times) < len(shape.dims):
        raise Unfit(f"{len(times)} repeats of shape {list(shape.dims)}")
    count = max(len(times), len(shape.dims))
    sizes = [1] * (count - len(shape.dims)) + list(shape.dims)
    each = [1] * (count - len(times)) + list(times)
    if min(each, default=1) < 0:
        raise Unfit(f"repeats {list(times)[:8]}")
    return replace(shape, dims=tuple(size * more for size, more in zip(sizes, each, strict=True)))


def repeat_interleave(given: Given) -> Shape:
    shape: Shape = given["input"]
    times = given["repeats"]
    if times < 0:
        raise Unfit(f"repeats {times}")
    if given.get("dim") is None:
        return replace(shape, dims=(shape.elements * times,))
    dim = dim_given(given)
    return with_size(shape, dim, shape.dims[dim] * times) if shape.dims else replace(shape, dims=(times,))
