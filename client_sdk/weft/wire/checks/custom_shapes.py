"""How large the result of each operation of an uploaded loss is, from the sizes of its operands. No torch here.

A rule takes the arguments of a form of `custom_names` by name and gives what the result will be. Tensors are known by
their shape; where a mask has chosen elements it is an upper bound (`exact` is then false), and a number read from such
a shape is `UNKNOWN`. All other numbers, and all tuples, are known before anything runs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

MAX_DIMS = 8
#: Values that a tuple may hold, those of tuples inside of it and these tuples included.
MAX_LEAVES = 128
MAX_NUMBER = 2.0**63


class CustomLossError(ValueError):
    """The uploaded loss, or what it is run on, cannot be used; the message names node or datum."""


class Unfit(CustomLossError):
    """These sizes do not fit the loss; others may."""


@dataclass(frozen=True)
class Shape:
    """A tensor. `kind`: b truth values, i integers, f floating point."""

    dims: tuple[int, ...]
    kind: str = "f"
    exact: bool = True

    @property
    def elements(self) -> int:
        return math.prod(self.dims)


@dataclass(frozen=True)
class Unknown:
    """A number that depends on the values of the data."""


@dataclass(frozen=True)
class Dtype:
    kind: str


@dataclass(frozen=True)
class Device:
    """Where a tensor lies, which is not the loss's to say."""


UNKNOWN = Unknown()
Given = Mapping[str, Any]


def is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float | Unknown)


def leaves(value: Any) -> int:
    """The values that a tuple holds, at any depth, itself included; not counted on beyond MAX_LEAVES."""
    if not isinstance(value, tuple | list):
        return 1
    total = 1
    for item in value:
        total += leaves(item)
        if total > MAX_LEAVES:
            break
    return total


# ---- numbers


def number(target: str, values: Sequence[Any]) -> Any:
    """A function of Python on numbers. Also what runs it: what it gives is never longer than MAX_NUMBER."""
    if any(isinstance(value, Unknown) for value in values):
        return UNKNOWN
    room, _, name = target.rpartition(".")
    try:
        if name == "pow" and (abs(values[1]) > 64 or abs(values[0]) > MAX_NUMBER):
            values = [float(values[0]), float(values[1])]
        found = getattr(operator if room == "operator" else math, name)(*values)
    except (ArithmeticError, ValueError, TypeError):
        raise Unfit("it is not defined for these numbers") from None
    if isinstance(found, complex):
        raise Unfit("it is not defined for these numbers")
    if isinstance(found, int) and abs(found) > MAX_NUMBER:
        raise CustomLossError("a number beyond 2^63")
    return found


# ---- what rules have in common


def broadcast(shapes: Sequence[Shape]) -> tuple[int, ...]:
    dims: list[int] = []
    for place in range(1, max((len(shape.dims) for shape in shapes), default=0) + 1):
        here = [(shape.dims[-place], shape.exact) for shape in shapes if len(shape.dims) >= place]
        sizes = {size for size, exact in here if exact and size != 1}
        if len(sizes) > 1:
            raise Unfit(f"shapes {_listed(shapes)} do not fit")
        most = max(size for size, _ in here)
        dims.insert(0, 0 if sizes == {0} and all(exact for _, exact in here) else most)
    return tuple(dims)


def _listed(shapes: Sequence[Shape]) -> str:
    return " and ".join(str(list(shape.dims)) for shape in shapes[:4])


def _tensors(given: Given) -> list[Shape]:
    return [value for value in given.values() if isinstance(value, Shape)]


def _kind(given: Given) -> str:
    kinds = {shape.kind for shape in _tensors(given)}
    kinds |= {
        "b" if isinstance(value, bool) else "i" if isinstance(value, int) else "f"
        for name, value in given.items()
        if is_number(value) and name in ("input", "other", "exponent", "alpha", "value", "min", "max")
    }
    return next(kind for kind in "fib" if kind in kinds)


def _exact(given: Given) -> bool:
    return all(shape.exact for shape in _tensors(given))


def dim_of(dim: int, count: int) -> int:
    """A dimension counted from the front."""
    if not -max(1, count) <= dim < max(1, count):
        raise Unfit(f"dimension {dim} of a tensor of {count} dimensions")
    return dim % max(1, count)


def _sizes(value: Any) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _dims(given: Given) -> tuple[int, ...]:
    """Those that a reduction is over: all, unless it says so."""
    shape, dim = given["input"], given.get("dim")
    if dim is None or dim == () or dim == []:
        return tuple(range(len(shape.dims)))
    return tuple(dim_of(each, len(shape.dims)) for each in _sizes(dim))


def _known(shape: Shape) -> Shape:
    if not shape.exact:
        raise CustomLossError("its operand's shape depends on a mask; only reshape(-1) and flatten() are possible")
    return shape


def _changed(shape: Shape, place: int, size: int) -> Shape:
    if not shape.dims:
        return shape
    return replace(shape, dims=(*shape.dims[:place], size, *shape.dims[place + 1 :]))


def _made(dims: Sequence[int], kind: str) -> Shape:
    if any(size < 0 for size in dims):
        raise Unfit(f"sizes {list(dims)[:8]}")
    return Shape(tuple(dims), kind)


# ---- the rules: a result from arguments by name


def _each(given: Given) -> Shape:
    return Shape(broadcast(_tensors(given)), _kind(given), _exact(given))


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
    shape, gone = given["input"], _dims(given)
    kept = given.get("keepdim") or False
    dims = [1 if at in gone else size for at, size in enumerate(shape.dims) if kept or at not in gone]
    return Shape(tuple(dims), "i" if shape.kind == "b" else shape.kind, shape.exact or not dims)


def _dim(given: Given, otherwise: int = -1) -> int:
    dim = given.get("dim")
    return dim_of(otherwise if dim is None else dim, len(given["input"].dims))


def _along(given: Given) -> Shape:
    _dim(given)
    shape: Shape = given["input"]
    return replace(shape, kind="i" if shape.kind == "b" else shape.kind)


def _pair(given: Given) -> tuple[Shape, Shape]:
    _dim(given)
    shape: Shape = given["input"]
    return shape, replace(shape, kind="i")


def _chosen(given: Given) -> tuple[Shape, Shape]:
    shape = _extreme(given)
    return shape, replace(shape, kind="i")


def _topk(given: Given) -> tuple[Shape, Shape]:
    shape: Shape = given["input"]
    dim = _dim(given)
    if given["k"] < 0 or (shape.dims and given["k"] > shape.dims[dim]):
        raise Unfit(f"the largest {given['k']} of shape {list(shape.dims)}")
    shape = _changed(shape, dim, given["k"])
    return shape, replace(shape, kind="i")


def _diff(given: Given) -> Shape:
    shape, dim, times = given["input"], _dim(given), given.get("n", 1)
    if not 0 <= times <= 4 or not shape.dims:
        raise CustomLossError(f"n is {times}; differences are taken 0 to 4 times, of a tensor that has a dimension")
    return _changed(shape, dim, max(0, shape.dims[dim] - times))


def _gather(given: Given) -> Shape:
    _dim(given)
    _integers(given["index"])
    index: Shape = given["index"]
    return replace(index, kind=given["input"].kind)


def _integers(index: Shape) -> Shape:
    if index.kind != "i":
        raise CustomLossError("an index must be integers")
    return index


def _index_select(given: Given) -> Shape:
    shape, index = given["input"], _integers(given["index"])
    return replace(_changed(shape, _dim(given), index.elements), exact=shape.exact and index.exact)


def _take_along(given: Given) -> Shape:
    shape, indices = given["input"], _integers(given["indices"])
    if given.get("dim") is None:
        return replace(indices, dims=(indices.elements,), kind=shape.kind)
    dim = _dim(given)
    if len(shape.dims) != len(indices.dims):
        raise Unfit(f"shapes {_listed([shape, indices])} do not fit")
    others = [_changed(each, dim, 1) for each in (shape, indices)]
    wide = Shape(broadcast(others), shape.kind, shape.exact and indices.exact)
    return _changed(wide, dim, indices.dims[dim] if indices.dims else 1)


def _unsqueeze(given: Given) -> Shape:
    shape: Shape = given["input"]
    dim = dim_of(given["dim"], len(shape.dims) + 1)
    return replace(shape, dims=(*shape.dims[:dim], 1, *shape.dims[dim:]))


def _squeeze(given: Given) -> Shape:
    shape, dims = _known(given["input"]), _dims(given)
    return replace(shape, dims=tuple(size for at, size in enumerate(shape.dims) if not (at in dims and size == 1)))


def _reshape(given: Given) -> Shape:
    shape: Shape = given["input"]
    dims = list(_sizes(given["shape"]))
    if dims == [-1]:
        return replace(shape, dims=(shape.elements,))
    _known(shape)
    if -1 in dims:
        rest = math.prod(size for size in dims if size != -1)
        dims[dims.index(-1)] = shape.elements // rest if rest else 0
    if math.prod(dims) != shape.elements or any(size < 0 for size in dims):
        raise Unfit(f"shape {list(shape.dims)} cannot become {list(_sizes(given['shape']))[:8]}")
    return replace(shape, dims=tuple(dims))


def _flatten(given: Given) -> Shape:
    shape: Shape = given["input"]
    count = len(shape.dims)
    first, last = (dim_of(given.get(name, other), count) for name, other in (("start_dim", 0), ("end_dim", -1)))
    if first > last:
        raise Unfit("start_dim is behind end_dim")
    return replace(shape, dims=(*shape.dims[:first], math.prod(shape.dims[first : last + 1]), *shape.dims[last + 1 :]))


def _unflatten(given: Given) -> Shape:
    shape, dim = _known(given["input"]), _dim(given)
    if not shape.dims:
        raise Unfit("a scalar has no dimension")
    part = _reshape({"input": Shape((shape.dims[dim],)), "shape": given["sizes"]})
    return replace(shape, dims=(*shape.dims[:dim], *part.dims, *shape.dims[dim + 1 :]))


def _ordered(shape: Shape, order: Sequence[int]) -> Shape:
    if sorted(order) != list(range(len(shape.dims))):
        raise Unfit(f"dimensions {list(order)[:8]} of shape {list(shape.dims)}")
    return replace(shape, dims=tuple(shape.dims[at] for at in order))


def _transpose(given: Given) -> Shape:
    """Of the two dimensions given; else of the last two, where there are two."""
    shape: Shape = given["input"]
    order = list(range(len(shape.dims)))
    if len(order) < 2 and "dim0" not in given:
        return shape
    first, second = (dim_of(given.get(name, other), len(order)) for name, other in (("dim0", -2), ("dim1", -1)))
    if order:
        order[first], order[second] = order[second], order[first]
    return _ordered(shape, order)


def _permute(given: Given) -> Shape:
    shape: Shape = given["input"]
    return _ordered(shape, [dim_of(each, len(shape.dims)) for each in _sizes(given["dims"])])


def _movedim(given: Given) -> Shape:
    shape: Shape = given["input"]
    source, destination = (dim_of(given[name], len(shape.dims)) for name in ("source", "destination"))
    order = [at for at in range(len(shape.dims)) if at != source]
    if shape.dims:
        order.insert(destination, source)
    return _ordered(shape, order)


def _narrow(given: Given) -> Shape:
    shape, dim, length = given["input"], _dim(given), given["length"]
    if not shape.dims or not 0 <= length <= shape.dims[dim]:
        raise Unfit(f"{length} elements from {given['start']} on, of shape {list(shape.dims)}")
    return _changed(shape, dim, length)


def _select(given: Given) -> Shape:
    shape: Shape = given["input"]
    dim = _dim(given)
    return replace(shape, dims=_without(shape, dim, given["index"]))


def _without(shape: Shape, dim: int, index: int) -> tuple[int, ...]:
    size = shape.dims[dim] if shape.dims else 0
    if not -size <= index < size:
        raise Unfit(f"index {index} of a dimension of {size}")
    return (*shape.dims[:dim], *shape.dims[dim + 1 :])


def _expand(given: Given) -> Shape:
    shape, sizes = _known(given["input"]), list(_sizes(given["size"]))
    lead = len(sizes) - len(shape.dims)
    if lead < 0 or any(size < (-1 if at >= lead else 0) for at, size in enumerate(sizes)):
        raise Unfit(f"shape {list(shape.dims)} cannot become {sizes[:8]}")
    whole = [shape.dims[at - lead] if size == -1 else size for at, size in enumerate(sizes)]
    if broadcast([shape, Shape(tuple(whole))]) != tuple(whole):
        raise Unfit(f"shape {list(shape.dims)} cannot become {sizes[:8]}")
    return replace(shape, dims=tuple(whole))


def _repeat(given: Given) -> Shape:
    shape: Shape = given["input"]
    times = _sizes(given["repeats"] if "repeats" in given else given["dims"])
    if "repeats" in given and len(times) < len(shape.dims):
        raise Unfit(f"{len(times)} repeats of shape {list(shape.dims)}")
    count = max(len(times), len(shape.dims))
    sizes = [1] * (count - len(shape.dims)) + list(shape.dims)
    each = [1] * (count - len(times)) + list(times)
    if min(each, default=1) < 0:
        raise Unfit(f"repeats {list(times)[:8]}")
    return replace(shape, dims=tuple(size * more for size, more in zip(sizes, each, strict=True)))


def _repeat_interleave(given: Given) -> Shape:
    shape: Shape = given["input"]
    times = given["repeats"]
    if times < 0:
        raise Unfit(f"repeats {times}")
    if given.get("dim") is None:
        return replace(shape, dims=(shape.elements * times,))
    dim = _dim(given)
    return _changed(shape, dim, shape.dims[dim] * times) if shape.dims else replace(shape, dims=(times,))


def _dot(given: Given) -> Shape:
    pair = [given["input"], given["tensor"]]
    if any(len(shape.dims) != 1 for shape in pair):
        raise Unfit(f"shapes {_listed(pair)} do not fit")
    broadcast(pair)
    return Shape((), _kind(given))


def _outer(given: Given) -> Shape:
    pair = [given["input"], given["vec2"]]
    if any(len(shape.dims) != 1 for shape in pair):
        raise Unfit(f"shapes {_listed(pair)} do not fit")
    return Shape((pair[0].dims[0], pair[1].dims[0]), _kind(given), _exact(given))


def _vector_norm(given: Given) -> Shape:
    """torch.linalg.norm takes the norm of a matrix, of one or of many, unless it is told one dimension or no order."""
    shape, order = given["input"], given.get("ord")
    if order not in (None, "fro") and len(_dims(given)) > 1:
        raise CustomLossError(
            f"ord is {order!r} over {len(_dims(given))} dimensions, which is the norm of a matrix; "
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
    return _made(_sizes(given["size"]), "b" if isinstance(fill, bool) else "i" if isinstance(fill, int) else "f")


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
    first, dim = given["tensors"][0], _dim(_joined(given), otherwise=0)
    if any(len(each.dims) != len(first.dims) or not each.dims for each in given["tensors"]):
        raise Unfit(f"shapes {_listed(given['tensors'])} do not fit")
    others = [_changed(each, dim, 1) for each in given["tensors"]]
    if all(each.exact for each in others) and len({each.dims for each in others}) > 1:
        raise Unfit(f"shapes {_listed(given['tensors'])} do not fit")
    wide = Shape(broadcast(others), _kind(_joined(given)), _exact(_joined(given)))
    return _changed(wide, dim, sum(each.dims[dim] for each in given["tensors"]))


def _stack(given: Given) -> Shape:
    if _exact(_joined(given)) and len({each.dims for each in given["tensors"]}) > 1:
        raise Unfit(f"shapes {_listed(given['tensors'])} do not fit")
    wide = Shape(broadcast(given["tensors"]), _kind(_joined(given)), _exact(_joined(given)))
    dim = dim_of(given.get("dim") or 0, len(wide.dims) + 1)
    return replace(wide, dims=(*wide.dims[:dim], len(given["tensors"]), *wide.dims[dim:]))


def _like(given: Given) -> Shape:
    shape, other = _known(given["input"]), _known(given["other"])
    return replace(shape, dims=broadcast([shape, other]) if shape.elements != other.elements else other.dims)


def _made_like(given: Given) -> Shape:
    shape: Shape = given["input"]
    return shape


def _made_beside(given: Given) -> Shape:
    return _made(_sizes(given["size"]), given["input"].kind)


def _type_as(given: Given) -> Shape:
    return replace(_made_like(given), kind=given["other"].kind)


def _index_fill(given: Given) -> Shape:
    _integers(given["index"])
    _dim(given)
    return _made_like(given)


def _loss(given: Given) -> Shape:
    how = given.get("reduction", "mean")
    if how not in ("none", "mean", "sum", "batchmean"):
        raise CustomLossError(f"reduction is {how!r}; it is none, mean, sum or batchmean")
    wide = Shape(broadcast(_tensors(given)), "f", _exact(given))
    return wide if how == "none" else Shape(())


def _pad(given: Given) -> Shape:
    shape, widths = given["input"], _sizes(given["pad"])
    if given.get("mode", "constant") != "constant":
        raise CustomLossError(f"mode is {given['mode']!r}; only constant is possible")
    if len(widths) % 2 or len(widths) > 2 * len(shape.dims):
        raise Unfit(f"{len(widths)} widths for shape {list(shape.dims)}")
    dims = list(shape.dims)
    for at in range(len(widths) // 2):
        dims[-1 - at] += widths[2 * at] + widths[2 * at + 1]
    return replace(_made(dims, shape.kind), exact=shape.exact)


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
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "flatten": _flatten,
    "unflatten": _unflatten,
    "transpose": _transpose,
    "permute": _permute,
    "movedim": _movedim,
    "narrow": _narrow,
    "select": _select,
    "expand": _expand,
    "repeat": _repeat,
    "repeat_interleave": _repeat_interleave,
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


def indexed(value: Any, index: Any) -> Any:
    """What value[index] is: of a tuple, or of a tensor by numbers, slices, masks or tensors of integers."""
    if isinstance(value, tuple):
        if isinstance(index, slice) and all(part is None or isinstance(part, int) for part in _parts(index)):
            return value[index]
        if isinstance(index, int) and -len(value) <= index < len(value):
            return value[index]
        raise Unfit(f"a tuple of {len(value)} values is indexed by a number or a slice within it")
    if not isinstance(value, Shape):
        raise CustomLossError("only tensors and tuples can be indexed")
    return _Indexing(value).result(index if isinstance(index, tuple) else (index,))


def _parts(index: slice) -> tuple[Any, Any, Any]:
    return index.start, index.stop, index.step


class _Indexing:
    def __init__(self, value: Shape) -> None:
        self.left, self.value = list(value.dims), value
        self.exact = value.exact
        self.dims: list[int] = []
        self.gathered: list[Shape] = []  # tensors in the index, and where each stands in `dims`
        self.places: list[int] = []

    def result(self, parts: tuple[Any, ...]) -> Shape:
        taken = sum(_taken(part) for part in parts)
        if taken > len(self.left) or sum(part is ... for part in parts) > 1:
            raise Unfit(f"an index of {taken} dimensions into shape {list(self.value.dims)}")
        for part in parts:
            if part is ...:
                count = len(self.value.dims) - taken
                self.dims += self.left[:count]
                del self.left[:count]
            else:
                self._take(part)
        dims = self.dims + self.left
        if self.gathered:
            wide = broadcast(self.gathered)
            adjacent = len(set(self.places)) == 1
            at = self.places[0] if adjacent else 0
            dims[at:at] = wide
        return Shape(tuple(dims), self.value.kind, self.exact)

    def _take(self, part: Any) -> None:
        if part is None:
            self.dims.append(1)
        elif isinstance(part, bool) or not isinstance(part, int | slice | Shape):
            raise CustomLossError(
                "an index is made of integers, slices, None, ..., masks and tensors of integers; for a list, index "
                "with torch.tensor(list)"
            )
        elif isinstance(part, int):
            size = self.left.pop(0)
            if not -size <= part < size and self.value.exact:
                raise Unfit(f"index {part} of a dimension of {size}")
        elif isinstance(part, slice):
            self.dims.append(self._sliced(self.left.pop(0), part))
        else:
            self._gather(part)

    def _sliced(self, size: int, part: slice) -> int:
        if not all(each is None or (isinstance(each, int) and not isinstance(each, bool)) for each in _parts(part)):
            raise CustomLossError("a slice is made of integers that do not depend on the values of the data")
        if part.step is not None and part.step <= 0:
            raise CustomLossError("a slice's step must be greater than zero")
        return len(range(*part.indices(size))) if self.value.exact else size

    def _gather(self, part: Shape) -> None:
        if part.kind == "f":
            raise CustomLossError("an index must be integers or a mask, not floating point")
        self.places.append(len(self.dims))
        if part.kind == "i":
            del self.left[:1]
            self.exact = self.exact and part.exact
            self.gathered.append(part)
            return
        covered = tuple(self.left[: len(part.dims)])
        if covered != part.dims and self.exact and part.exact:
            raise Unfit(f"a mask of shape {list(part.dims)} for shape {list(self.value.dims)}")
        del self.left[: len(part.dims)]
        self.exact = False
        self.gathered.append(Shape((math.prod(covered),), exact=False))


def _taken(part: Any) -> int:
    if isinstance(part, Shape):
        return len(part.dims) if part.kind == "b" else 1
    return 0 if part is None or part is ... else 1
