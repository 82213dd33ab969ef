"""How large the result of each operation of an uploaded loss is. No torch here.

A rule takes the arguments of a form of `custom_names` by name and returns the shape or the value of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from weft.wire.checks import custom_reshaping
from weft.wire.checks.custom_shapes import (
    UNKNOWN,
    CustomLossError,
    Given,
    Shape,
    Unfit,
    Unknown,
    all_exact,
    as_sizes,
    broadcast,
    dim_given,
    dim_of,
    dims_given,
    kind_of,
    known,
    listed,
    made,
    tensors_of,
    with_size,
)


def _each(given: Given) -> Shape:
    return Shape(broadcast(tensors_of(given)), kind_of(given), all_exact(given))


def _counts(given: Given) -> Shape:
    shape = _each(given)
    return replace(shape, kind="i" if shape.kind == "b" else shape.kind)


def _filled(given: Given) -> Shape:
    return replace(_each(given), kind=given["input"].kind)


def _extreme(given: Given) -> Shape:
    return replace(_reduced(given), kind=given["input"].kind)


def _of_kind(rule: Callable[[Given], Shape], kind: str) -> Callable[[Given], Shape]:
    return lambda given: replace(rule(given), kind=kind)


def _reduced(given: Given) -> Shape:
    shape, gone = given["input"], dims_given(given)
    kept = given.get("keepdim") or False
    dims = [1 if at in gone else size for at, size in enumerate(shape.dims) if kept or at not in gone]
    return Shape(tuple(dims), "i" if shape.kind == "b" else shape.kind, shape.exact or not dims)


def _along(given: Given) -> Shape:
    dim_given(given)
    shape: Shape = given["input"]
    return replace(shape, kind="i" if shape.kind == "b" else shape.kind)


def _pair(given: Given) -> tuple[Shape, Shape]:
    dim_given(given)
    shape: Shape = given["input"]
    return shape, replace(shape, kind="i")


def _chosen(given: Given) -> tuple[Shape, Shape]:
    shape = _extreme(given)
    return shape, replace(shape, kind="i")


def _topk(given: Given) -> tuple[Shape, Shape]:
    shape: Shape = given["input"]
    dim = dim_given(given)
    if given["k"] < 0 or (shape.dims and given["k"] > shape.dims[dim]):
        raise Unfit(f"the largest {given['k']} of shape {list(shape.dims)}")
    shape = with_size(shape, dim, given["k"])
    return shape, replace(shape, kind="i")


def _diff(given: Given) -> Shape:
    shape, dim, times = given["input"], dim_given(given), given.get("n", 1)
    if not 0 <= times <= 4 or not shape.dims:
        raise CustomLossError(f"n is {times}; differences are taken 0 to 4 times, of a tensor that has a dimension")
    return with_size(shape, dim, max(0, shape.dims[dim] - times))


def _gather(given: Given) -> Shape:
    dim_given(given)
    _integers(given["index"])
    index: Shape = given["index"]
    return replace(index, kind=given["input"].kind)


def _integers(index: Shape) -> Shape:
    if index.kind not in "iu":
        raise CustomLossError("an index must be integers")
    return index


def _index_select(given: Given) -> Shape:
    shape, index = given["input"], _integers(given["index"])
    return replace(with_size(shape, dim_given(given), index.elements), exact=shape.exact and index.exact)


def _take_along(given: Given) -> Shape:
    shape, indices = given["input"], _integers(given["indices"])
    if given.get("dim") is None:
        return replace(indices, dims=(indices.elements,), kind=shape.kind)
    dim = dim_given(given)
    if len(shape.dims) != len(indices.dims):
        raise Unfit(f"shapes {listed([shape, indices])} do not fit")
    others = [with_size(each, dim, 1) for each in (shape, indices)]
    wide = Shape(broadcast(others), shape.kind, shape.exact and indices.exact)
    return with_size(wide, dim, indices.dims[dim] if indices.dims else 1)


def _dot(given: Given) -> Shape:
    pair = [given["input"], given["tensor"]]
    if any(len(shape.dims) != 1 for shape in pair):
        raise Unfit(f"shapes {listed(pair)} do not fit")
    broadcast(pair)
    return Shape((), kind_of(given))


def _outer(given: Given) -> Shape:
    pair = [given["input"], given["vec2"]]
    if any(len(shape.dims) != 1 for shape in pair):
        raise Unfit(f"shapes {listed(pair)} do not fit")
    return Shape((pair[0].dims[0], pair[1].dims[0]), kind_of(given), all_exact(given))


def _vector_norm(given: Given) -> Shape:
    """The norm of a vector. A matrix norm, which torch.linalg.norm computes if it is given an order and several
    dimensions, is refused."""
    shape, order = given["input"], given.get("ord")
    if order not in (None, "fro") and len(dims_given(given)) > 1:
        raise CustomLossError(
            f"ord is {order!r} over {len(dims_given(given))} dimensions, which is the norm of a matrix; "
            "a custom loss may have norms of vectors: give one dim, or no ord"
        )
    return replace(_reduced(given), kind=shape.kind)


def _size(given: Given) -> Any:
    shape, dim = given["input"], given.get("dim")
    if dim is None:
        return shape.dims if shape.exact else (UNKNOWN,) * len(shape.dims)
    at = dim_of(dim, len(shape.dims))
    if not shape.dims:
        raise Unfit("a scalar has no dimension")
    return shape.dims[at] if shape.exact else UNKNOWN


def _numel(given: Given) -> Any:
    shape: Shape = given["input"]
    return shape.elements if shape.exact else UNKNOWN


def _zeros(given: Given) -> Shape:
    fill = given.get("fill_value", 0.0)
    return made(as_sizes(given["size"]), "b" if isinstance(fill, bool) else "i" if isinstance(fill, int) else "f")


def _arange(given: Given) -> Shape:
    start, end, step = given.get("start", 0), given["end"], given.get("step", 1)
    if any(isinstance(value, Unknown) for value in (start, end, step)):
        raise CustomLossError("its length would depend on the values of the data")
    if not all(map(math.isfinite, (start, end, step))) or step == 0 or (end - start) * step < 0:
        raise Unfit(f"from {start} to {end} in steps of {step}")
    whole = all(isinstance(value, int) for value in (start, end, step))
    return Shape((math.ceil((end - start) / step),), "i" if whole else "f")


def _constant(given: Given) -> Shape:
    def dims(data: Any) -> tuple[int, ...]:
        if not isinstance(data, tuple | list):
            return ()
        inner = {dims(item) for item in data}
        if len(inner) > 1:
            raise Unfit("rows of different lengths")
        return (len(data), *(inner.pop() if inner else ()))

    def flat(data: Any) -> list[Any]:
        return [leaf for item in data for leaf in flat(item)] if isinstance(data, tuple | list) else [data]

    kinds = {"b" if isinstance(leaf, bool) else "i" if isinstance(leaf, int) else "f" for leaf in flat(given["data"])}
    return Shape(dims(given["data"]), next((kind for kind in "fib" if kind in kinds), "f"))


def _joined(given: Given) -> Given:
    return {**given, **{str(at): each for at, each in enumerate(given["tensors"])}, "input": given["tensors"][0]}


def _cat(given: Given) -> Shape:
    first, dim = given["tensors"][0], dim_given(_joined(given), otherwise=0)
    if any(len(each.dims) != len(first.dims) or not each.dims for each in given["tensors"]):
        raise Unfit(f"shapes {listed(given['tensors'])} do not fit")
    others = [with_size(each, dim, 1) for each in given["tensors"]]
    if all(each.exact for each in others) and len({each.dims for each in others}) > 1:
        raise Unfit(f"shapes {listed(given['tensors'])} do not fit")
    wide = Shape(broadcast(others), kind_of(_joined(given)), all_exact(_joined(given)))
    return with_size(wide, dim, sum(each.dims[dim] for each in given["tensors"]))


def _stack(given: Given) -> Shape:
    if all_exact(_joined(given)) and len({each.dims for each in given["tensors"]}) > 1:
        raise Unfit(f"shapes {listed(given['tensors'])} do not fit")
    wide = Shape(broadcast(given["tensors"]), kind_of(_joined(given)), all_exact(_joined(given)))
    dim = dim_of(given.get("dim") or 0, len(wide.dims) + 1)
    return replace(wide, dims=(*wide.dims[:dim], len(given["tensors"]), *wide.dims[dim:]))


def _like(given: Given) -> Shape:
    shape, other = known(given["input"]), known(given["other"])
    return replace(shape, dims=broadcast([shape, other]) if shape.elements != other.elements else other.dims)


def _made_like(given: Given) -> Shape:
    shape: Shape = given["input"]
    return shape


def _made_beside(given: Given) -> Shape:
    return made(as_sizes(given["size"]), given["input"].kind)


def _type_as(given: Given) -> Shape:
    return replace(_made_like(given), kind=given["other"].kind)


def _index_fill(given: Given) -> Shape:
    _integers(given["index"])
    dim_given(given)
    return _made_like(given)


def _loss(given: Given) -> Shape:
    how = given.get("reduction", "mean")
    if how not in ("none", "mean", "sum", "batchmean"):
        raise CustomLossError(f"reduction is {how!r}; it is none, mean, sum or batchmean")
    wide = Shape(broadcast(tensors_of(given)), "f", all_exact(given))
    return wide if how == "none" else Shape(())


def _pad(given: Given) -> Shape:
    shape, widths = given["input"], as_sizes(given["pad"])
    if given.get("mode", "constant") != "constant":
        raise CustomLossError(f"mode is {given['mode']!r}; only constant is possible")
    if len(widths) % 2 or len(widths) > 2 * len(shape.dims):
        raise Unfit(f"{len(widths)} widths for shape {list(shape.dims)}")
    dims = list(shape.dims)
    for at in range(len(widths) // 2):
        dims[-1 - at] += widths[2 * at] + widths[2 * at + 1]
    return replace(made(dims, shape.kind), exact=shape.exact)


RULES: Mapping[str, Callable[[Given], Any]] = {
    "each": _each,
    "counts": _counts,
    "filled": _filled,
    "extreme": _extreme,
    "floats": _of_kind(_each, "f"),
    "flags": _of_kind(_each, "b"),
    "reduced": _reduced,
    "reduced_floats": _of_kind(_reduced, "f"),
    "reduced_flags": _of_kind(_reduced, "b"),
    "reduced_places": _of_kind(_reduced, "i"),
    "chosen": _chosen,
    "along": _along,
    "along_floats": _of_kind(_along, "f"),
    "places": _of_kind(_along, "i"),
    "pair": _pair,
    "topk": _topk,
    "diff": _diff,
    "gather": _gather,
    "index_select": _index_select,
    "take_along": _take_along,
    "unsqueeze": custom_reshaping.unsqueeze,
    "squeeze": custom_reshaping.squeeze,
    "reshape": custom_reshaping.reshape,
    "flatten": custom_reshaping.flatten,
    "unflatten": custom_reshaping.unflatten,
    "transpose": custom_reshaping.transpose,
    "permute": custom_reshaping.permute,
    "movedim": custom_reshaping.movedim,
    "narrow": custom_reshaping.narrow,
    "select": custom_reshaping.select,
    "expand": custom_reshaping.expand,
    "repeat": custom_reshaping.repeat,
    "repeat_interleave": custom_reshaping.repeat_interleave,
    "dot": _dot,
    "outer": _outer,
    "vector_norm": _vector_norm,
    "size": _size,
    "ndim": lambda given: len(given["input"].dims),
    "numel": _numel,
    "made": _zeros,
    "arange": _arange,
    "constant": _constant,
    "cat": _cat,
    "stack": _stack,
    "like": _like,
    "made_like": _made_like,
    "made_beside": _made_beside,
    "to": _made_like,
    "type_as": _type_as,
    "index_fill": _index_fill,
    "loss": _loss,
    "pad": _pad,
}
