"""What is known of a value in an uploaded loss before anything runs, and helpers shared by the rules (`custom_rules`).

Tensors are known by their shape; where a mask has chosen elements it is an upper bound (`exact` is then false), and a
number read from such a shape is `UNKNOWN`. All other numbers, and all tuples, are known before anything runs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

MAX_DIMS = 8
#: How many values a tuple may hold, nested tuples and their values included.
MAX_LEAVES = 128
MAX_NUMBER = 2.0**63


class CustomLossError(ValueError):
    """The uploaded loss, or what it is run on, cannot be used; the message names node or datum."""


class Unfit(CustomLossError):
    """The loss is not possible with these sizes; other sizes may work."""


@dataclass(frozen=True)
class Shape:
    """A tensor. `kind`: b truth values, i integers, f floating point; u numbers of which it is not known yet."""

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
    """The device of a tensor, which a loss may not choose."""


UNKNOWN = Unknown()
Given = Mapping[str, Any]


def is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float | Unknown)


def leaves(value: Any) -> int:
    """How many values a tuple holds at any depth, itself included; counting stops beyond MAX_LEAVES."""
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
    """Call a function of Python on numbers. The interpreter calls it through here, too: no whole number beyond
    MAX_NUMBER comes of it."""
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
            raise Unfit(f"shapes {listed(shapes)} do not fit")
        most = max(size for size, _ in here)
        dims.insert(0, 0 if sizes == {0} and all(exact for _, exact in here) else most)
    return tuple(dims)


def listed(shapes: Sequence[Shape]) -> str:
    return " and ".join(str(list(shape.dims)) for shape in shapes[:4])


def tensors_of(given: Given) -> list[Shape]:
    return [value for value in given.values() if isinstance(value, Shape)]


def kind_of(given: Given) -> str:
    kinds = {shape.kind for shape in tensors_of(given)}
    kinds |= {
        "b" if isinstance(value, bool) else "i" if isinstance(value, int) else "f"
        for name, value in given.items()
        if is_number(value) and name in ("input", "other", "exponent", "alpha", "value", "min", "max")
    }
    return next(kind for kind in "fuib" if kind in kinds)


def all_exact(given: Given) -> bool:
    return all(shape.exact for shape in tensors_of(given))


def dim_of(dim: int, count: int) -> int:
    """The index of a dimension, counted from the front."""
    if not -max(1, count) <= dim < max(1, count):
        raise Unfit(f"dimension {dim} of a tensor of {count} dimensions")
    return dim % max(1, count)


def as_sizes(value: Any) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def dims_given(given: Given) -> tuple[int, ...]:
    """The dimensions that a reduction is over: all, unless it names some."""
    shape, dim = given["input"], given.get("dim")
    if dim is None or dim == () or dim == []:
        return tuple(range(len(shape.dims)))
    return tuple(dim_of(each, len(shape.dims)) for each in as_sizes(dim))


def known(shape: Shape) -> Shape:
    if not shape.exact:
        raise CustomLossError("its operand's shape depends on a mask; only reshape(-1) and flatten() are possible")
    return shape


def with_size(shape: Shape, place: int, size: int) -> Shape:
    if not shape.dims:
        return shape
    return replace(shape, dims=(*shape.dims[:place], size, *shape.dims[place + 1 :]))


def made(dims: Sequence[int], kind: str) -> Shape:
    if any(size < 0 for size in dims):
        raise Unfit(f"sizes {list(dims)[:8]}")
    return Shape(tuple(dims), kind)


def dim_given(given: Given, otherwise: int = -1) -> int:
    dim = given.get("dim")
    return dim_of(otherwise if dim is None else dim, len(given["input"].dims))
