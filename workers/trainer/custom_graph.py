"""Runs uploaded losses, node by node, through tables that were filled from the allow-list when this was imported.

Nothing of a graph is ever evaluated as code, and no name of a graph is looked up on an object: a name is a key of a
table. Before a node runs, the size of what it could make is bounded; a datum has a budget of elements, so a loss costs
no more than a multiple of its data. Gradients flow through `logprobs` alone. Always on the CPU: an index out of range
there is an error, on a GPU it would take the device down for everybody.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from weft.wire.checks.custom_format import WRITING, CustomLoss, CustomLossError, Node
from weft.wire.checks.custom_names import DTYPES, FUNCTIONS, MATH, METHODS

from workers.trainer.custom_bounds import Call, elements_bound, indexed_elements, placed

#: Elements that a datum's nodes may make and read together: per position of the datum, and in addition.
ELEMENTS_PER_POSITION = 1024
ELEMENTS_FREE = 65_536
MAX_TUPLE = 64
MAX_NUMBER = 2.0**63
_CPU = torch.device("cpu")


def run_custom_loss(loss: CustomLoss, inputs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
    """The loss of one datum, a scalar that autograd can go back from, and its metrics. `inputs` in the order of
    `loss.inputs`. Raises CustomLossError naming the node that could not be computed."""
    positions = max(tensor.numel() for tensor in inputs)
    budget = _Budget(ELEMENTS_FREE + ELEMENTS_PER_POSITION * positions)
    values: dict[str, Any] = {}
    given = iter(inputs)
    for node in loss.nodes:
        if node.op == "placeholder":
            values[node.name] = next(given)
            continue
        try:
            values[node.name] = _run(node, values, budget)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0][:300]
            raise CustomLossError(f"custom loss {loss.name!r}, node {node.name} ({node.target}): {reason}") from None
    scalars = {key: _scalar(values[name], loss, key) for key, name in loss.metrics.items()}
    result = _scalar(values[loss.loss], loss, "the loss")
    if not result.is_floating_point():
        raise CustomLossError(f"custom loss {loss.name!r}: the loss is {result.dtype}, it must be floating point")
    return result, {key: float(value.detach()) for key, value in scalars.items()}


def _scalar(value: Any, loss: CustomLoss, what: str) -> Tensor:
    if not isinstance(value, Tensor) or value.ndim != 0:
        shape = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise CustomLossError(f"custom loss {loss.name!r}: {what} must be a scalar tensor, got {shape}")
    return value


class _Budget:
    def __init__(self, elements: int) -> None:
        self.limit = self.left = elements

    def spend(self, elements: int) -> None:
        self.left -= max(1, elements)
        if self.left < 0:
            raise CustomLossError(
                f"it would bring the elements computed for this datum above {self.limit} "
                f"({ELEMENTS_PER_POSITION} for each position and {ELEMENTS_FREE} on top)"
            )


def _run(node: Node, values: Mapping[str, Any], budget: _Budget) -> Any:
    call = (_FUNCTIONS if node.op == "call_function" else _METHODS)[node.target]
    args = [_decoded(arg, values) for arg in node.args]
    kwargs = {key: _decoded(arg, values) for key, arg in (node.kwargs or {}).items() if key not in _PLACES}
    if node.op == "call_method" and not (args and isinstance(args[0], Tensor)):
        raise CustomLossError("methods are called on tensors")
    budget.spend(elements_bound(node.target, call, args, kwargs))
    return _admitted(call(*args, **kwargs, **placed(node.target, "cpu")))


#: Keywords that say where a tensor lies, which the server decides, and those that are known to say nothing.
_PLACES = frozenset({"device", "layout", "memory_format", "pin_memory", "requires_grad", *WRITING})


def _decoded(arg: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(arg, list):
        return [_decoded(item, values) for item in arg]
    if not isinstance(arg, Mapping):
        return arg
    ((kind, content),) = arg.items()
    if kind == "ref":
        return values[content]
    if kind == "tuple":
        return tuple(_decoded(item, values) for item in content)
    if kind == "slice":
        return slice(*(_decoded(item, values) for item in content))
    if kind == "float":
        return float(content)
    if kind == "dtype":
        return _DTYPES[content]
    if kind == "ellipsis":
        return ...
    return _CPU if kind == "device" else None


def _admitted(value: Any) -> Any:
    """Only tensors, numbers, dtypes and short tuples of them live in a graph."""
    if isinstance(value, Tensor | torch.dtype | torch.device | bool):
        if isinstance(value, Tensor) and value.device != _CPU:
            raise CustomLossError(f"a tensor on {value.device}")
        return value
    if isinstance(value, int | float):
        if abs(value) > MAX_NUMBER:
            raise CustomLossError("a number beyond 2^63")
        return value
    if isinstance(value, tuple | list) and len(value) <= MAX_TUPLE:
        for item in value:
            _admitted(item)
        return value
    raise CustomLossError(f"it gives a {type(value).__name__}, or a tuple of more than {MAX_TUPLE} values")


def _numbers_only(call: Call) -> Call:
    def checked(*args: Any) -> Any:
        if not all(isinstance(arg, int | float) for arg in args):
            raise CustomLossError("math functions take numbers; use the torch function for tensors")
        return call(*args)

    return checked


def _arithmetic(call: Call) -> Call:
    """Python would multiply tuples and texts too, and make integers of any length."""

    def checked(*args: Any) -> Any:
        if not all(isinstance(arg, Tensor | int | float) for arg in args):
            raise CustomLossError("arithmetic takes tensors and numbers")
        return call(*args)

    return checked


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and abs(exponent) > 64:
        return float(base) ** exponent
    return base**exponent


def _add(first: Any, second: Any) -> Any:
    if isinstance(first, tuple) and isinstance(second, tuple):
        return tuple(first) + tuple(second)
    return _arithmetic(operator.add)(first, second)


def _getitem(value: Any, index: Any) -> Any:
    if isinstance(value, tuple) and isinstance(index, int | slice):
        return value[index]
    if not isinstance(value, Tensor):
        raise CustomLossError("only tensors and tuples can be indexed")
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, Tensor) and part.dtype != torch.bool for part in parts):
        if any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts):
            raise CustomLossError("index with integers or with a mask, not with both at once")
        made = indexed_elements(value, index)
        if made > ELEMENTS_PER_POSITION * max(1, value.numel()):
            raise CustomLossError(f"it would make {made} elements of {value.numel()}")
    return value[index]


def _attribute(value: Any, name: str) -> Any:
    return _ATTRIBUTES[name](value)


def _pair(value: Any) -> Any:
    if not isinstance(value, tuple):
        raise CustomLossError("only what a reduction along a dimension gives has values and indices")
    return value


def _to(value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The dtype of `.to(...)`; where the tensor lies is not the loss's to say."""
    for arg in [*args, *kwargs.values()]:
        if isinstance(arg, torch.dtype):
            return value.to(arg)
        if isinstance(arg, Tensor):
            return value.to(arg.dtype)
    return value


_ATTRIBUTES: dict[str, Call] = {
    "shape": lambda value: tuple(value.shape),
    "ndim": lambda value: value.ndim,
    "dtype": lambda value: value.dtype,
    "device": lambda value: _CPU,
    "T": lambda value: value.t() if value.ndim <= 2 else value.mT,
    "mT": lambda value: value.mT,
    "values": lambda value: _pair(value)[0],
    "indices": lambda value: _pair(value)[1],
}

#: Where torch's own function would take more than a loss may say (such as inplace), or Python's more than numbers.
_OWN: dict[str, Call] = {
    "getattr": _attribute,
    "operator.getitem": _getitem,
    "operator.add": _add,
    "operator.pow": _arithmetic(_power),
    "torch.nn.functional.relu": lambda x: torch.relu(x),
    "torch.nn.functional.silu": lambda x: torch.nn.functional.silu(x),
    "torch.nn.functional.leaky_relu": lambda x, negative_slope=0.01: torch.nn.functional.leaky_relu(x, negative_slope),
    "torch.nn.functional.elu": lambda x, alpha=1.0: torch.nn.functional.elu(x, alpha),
}


def _resolve(name: str) -> Call:
    """The function of an allow-listed name. Called at import, on our own list."""
    if name in _OWN:
        return _OWN[name]
    if name in MATH:
        return _numbers_only(getattr(math, name.removeprefix("math.")))
    if name.startswith("operator."):
        return _arithmetic(getattr(operator, name.removeprefix("operator.")))
    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
_FUNCTIONS: dict[str, Call] = {name: _resolve(name) for name in FUNCTIONS}
_METHODS: dict[str, Call] = {name: getattr(torch.Tensor, name) for name in METHODS if name != "to"} | {"to": _to}
