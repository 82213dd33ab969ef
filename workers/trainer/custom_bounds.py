"""Upper bounds on the size of a result in an uploaded loss, found before it is computed.

Most calls return no more elements than their operands broadcast or concatenated. Calls whose size comes from number
arguments are tried on meta tensors, where torch can do that quickly, or bounded by a product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from weft.wire.checks.custom_format import CustomLossError

Call = Callable[..., Any]

_FACTORIES = frozenset({"torch.zeros", "torch.ones", "torch.full", "torch.arange", "torch.tensor"})
_GROWING = frozenset(
    {"broadcast_to", "repeat_interleave", "index_select", "unflatten", "expand"} | {"new_zeros", "new_ones", "new_full"}
)
#: Calls whose result may be larger than their operands broadcast: tried on meta tensors first.
_SIZED = _FACTORIES - {"torch.arange"} | _GROWING | {f"torch.{name}" for name in _GROWING} | {"torch.nn.functional.pad"}
#: The same, but torch needs seconds of imports to try them on meta tensors: bounded by their operands' product.
_MULTIPLYING = frozenset({"repeat", "tile", "outer", "quantile"} | {"torch.tile", "torch.outer", "torch.quantile"})


def elements_bound(target: str, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """An upper bound on the elements that `call(*args, **kwargs)` returns and reads."""
    given = [*args, *kwargs.values()]
    if target in _SIZED:
        return _elements(call(*_meta(list(args)), **_meta(dict(kwargs)), **placed(target, "meta")))
    if target == "torch.arange":
        return _range_length(*args, **kwargs)
    if target in _MULTIPLYING:
        return _product_bound(given)
    return _broadcast_bound(given)


def indexed_elements(value: Tensor, index: Any) -> int:
    """How many elements value[index] has, with tensors of integers in the index."""
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, Tensor) and part.is_floating_point():
            raise CustomLossError(f"an index must be integers or a mask, not {part.dtype}")
    return _elements(value.to("meta")[_meta(index)])


def placed(target: str, device: str) -> dict[str, str]:
    """The device argument for a call that makes a tensor from numbers."""
    return {"device": device} if target in _FACTORIES else {}


def _meta(value: Any) -> Any:
    """The same arguments as meta tensors."""
    if isinstance(value, Tensor):
        return value.detach().to("meta")
    if isinstance(value, tuple | list):
        return type(value)(_meta(item) for item in value) if type(value) in (tuple, list) else value
    if isinstance(value, dict):
        return {key: _meta(item) for key, item in value.items()}
    return value


def _elements(value: Any) -> int:
    """The number of elements, from shapes: torch's own count can overflow."""
    if isinstance(value, Tensor):
        return math.prod(value.shape)
    return sum(_elements(item) for item in value) if isinstance(value, tuple | list) else 1


def _range_length(start: Any, end: Any = None, step: Any = 1, dtype: Any = None) -> int:
    first, last = (0, start) if end is None else (start, end)
    if not all(isinstance(value, int | float) for value in (first, last, step)):
        raise CustomLossError("arange takes numbers")
    return max(0, math.ceil(float((last - first) / step))) + 1


def _product_bound(args: Sequence[Any]) -> int:
    """The product of all tensors' element counts and of all integers."""
    product = 1
    for value in args:
        if isinstance(value, Tensor):
            product *= math.prod(value.shape)
        elif isinstance(value, tuple | list):
            product *= _product_bound(value)
        elif isinstance(value, int):
            product *= max(1, abs(value))
    return product


def _broadcast_bound(args: Sequence[Any]) -> int:
    """An upper bound on what any elementwise, reducing or joining call can return for `args`."""
    tensors: list[Tensor] = []
    stack = list(args)
    while stack:
        value = stack.pop()
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, tuple | list):
            stack.extend(value)
    product = 1
    for dim in range(1, max((t.ndim for t in tensors), default=0) + 1):
        product *= max((t.shape[-dim] for t in tensors if t.ndim >= dim), default=1) or 1
    return product + sum(math.prod(t.shape) for t in tensors)
