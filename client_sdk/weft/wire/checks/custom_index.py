"""The result of indexing in an uploaded loss."""

from __future__ import annotations

import math
from typing import Any

from weft.wire.checks.custom_shapes import (
    CustomLossError,
    Shape,
    Unfit,
    broadcast,
)


def indexed(value: Any, index: Any) -> Any:
    """The result of value[index]: of a tuple, or of a tensor by numbers, slices, masks or tensors of integers."""
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
                "an index is made of integers, slices, None, ..., masks and tensors of integers; for a list, name an "
                "input of integers, or stack what is at each place: torch.stack([x[0], x[2]])"
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
        if part.kind in "iu":
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
