"""Runs uploaded losses, node by node, by tables that are filled from the allow-list at import. custom.py calls it.

Invariant (security): nothing of a graph is evaluated as code, and no name of a graph is looked up on an object: a name
is a key of a table. A datum is planned before anything runs (`weft.wire.checks.custom_cost`): numbers and tuples are
taken from the plan, and the size of every tensor is known and bounded, so a loss costs at most a multiple of its data.
Gradients flow through `logprobs` alone.

Always on the CPU: there an index out of range is an error, on a GPU it would take the device down for everybody. No
message of torch's reaches the user, because it may contain a number that the loss computed from the log-probabilities.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from weft.wire.checks.custom_cost import PLACES, DatumPlan, decoded, is_computed, named, plan_datum
from weft.wire.checks.custom_format import CustomLoss, Node
from weft.wire.checks.custom_names import DTYPES, FUNCTIONS, METHODS
from weft.wire.checks.custom_shapes import CustomLossError, Shape, is_number, number

from workers.model.memory import is_out_of_memory

Call = Callable[..., Any]
_CPU = torch.device("cpu")


def shape_of(tensor: Tensor) -> Shape:
    """The shape of a tensor as plans describe it: dimensions, and float, bool or integer."""
    kind = "f" if tensor.is_floating_point() else "b" if tensor.dtype == torch.bool else "i"
    return Shape(tuple(tensor.shape), kind)


def run_custom_loss(
    loss: CustomLoss, inputs: Sequence[Tensor], plan: DatumPlan | None = None
) -> tuple[Tensor, dict[str, float]]:
    """The loss of one datum, a scalar that autograd can differentiate, and its metrics. `inputs` in the order of
    `loss.inputs`, on the CPU. Raises CustomLossError naming the node that could not be computed."""
    plan = plan or plan_datum(loss, [shape_of(tensor) for tensor in inputs])
    values: dict[str, Any] = {}
    given = iter(inputs)
    for node in loss.nodes:
        if node.op == "placeholder":
            values[node.name] = next(given)
            continue
        planned = plan.values[node.name]
        try:
            values[node.name] = _run(node, values, planned) if is_computed(planned) else planned
        except CustomLossError as error:
            raise CustomLossError(f"{named(loss, node)}: {error}") from None
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise CustomLossError(f"{named(loss, node)}: {_reason(error)}") from None
    result, metrics = values[loss.loss], {key: values[name] for key, name in loss.metrics.items()}
    return result, {key: float(value.detach()) for key, value in metrics.items()}


def _reason(error: Exception) -> str:
    """The text that tells a user of an error that torch raised, without torch's own message."""
    if isinstance(error, IndexError):
        return "an index is out of range"
    if isinstance(error, TypeError):
        return "torch does not take arguments of these types"
    return "torch could not compute it: shapes, dtypes or indices of its operands do not fit"


def _run(node: Node, values: Mapping[str, Any], planned: Any) -> Any:
    call = (_FUNCTIONS if node.op == "call_function" else _METHODS)[node.target]
    args = [decoded(arg, values, _SYMBOLS) for arg in node.args]
    kwargs = {key: decoded(arg, values, _SYMBOLS) for key, arg in (node.kwargs or {}).items() if key not in PLACES}
    if node.target.startswith(("operator.", "math.")) and all(map(is_number, args)):
        return number(node.target, args)
    value = call(*args, **kwargs)
    _check_as_planned(value, planned)
    return value


def _check_as_planned(value: Any, planned: Any) -> None:
    """Check that a result is no larger than planned, as later nodes rely on, and a bool tensor only if planned so: a
    mask as an index has a result of unknown size."""
    if isinstance(planned, Shape):
        good = isinstance(value, Tensor) and value.device == _CPU and value.numel() <= planned.elements
        if (
            not good
            or (value.dtype == torch.bool) != (planned.kind == "b")
            or (planned.exact and value.shape != planned.dims)
        ):
            raise CustomLossError("its result differs from what was planned; this is an error of the server's")
    elif isinstance(planned, tuple):
        if len(value) != len(planned):
            raise CustomLossError("its result differs from what was planned; this is an error of the server's")
        for item, plan in zip(value, planned, strict=True):
            _check_as_planned(item, plan)


def _getitem(value: Any, index: Any) -> Any:
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, Tensor) and part.dtype not in (torch.bool, torch.int64, torch.int32, torch.int16):
            raise CustomLossError(f"an index must be integers or a mask, not {part.dtype}")
    return value[index]


def _attribute(value: Any, name: str) -> Any:
    return _ATTRIBUTES[name](value)


def _to(value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`.to(...)` for dtypes; devices are ignored, because a loss may not choose one."""
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
    "values": lambda value: value[0],
    "indices": lambda value: value[1],
}

#: Used in place of functions of torch that take arguments which a loss may not give, such as inplace.
_OWN: dict[str, Call] = {
    "getattr": _attribute,
    "operator.getitem": _getitem,
    "torch.nn.functional.relu": lambda x: torch.relu(x),
    "torch.nn.functional.silu": lambda x: torch.nn.functional.silu(x),
    "torch.nn.functional.leaky_relu": lambda x, negative_slope=0.01: torch.nn.functional.leaky_relu(x, negative_slope),
    "torch.nn.functional.elu": lambda x, alpha=1.0: torch.nn.functional.elu(x, alpha),
}


def _resolve(name: str) -> Call:
    """The function of an allow-listed name. Called at import only, for the names of our own list."""
    if name in _OWN:
        return _OWN[name]
    if name.startswith("operator."):
        return getattr(operator, name.removeprefix("operator."))  # type: ignore[no-any-return]
    if name.startswith("math."):
        return lambda *args: number(name, args)
    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


_SYMBOLS: dict[str, Any] = {"dtype": {name: getattr(torch, name) for name in DTYPES}.__getitem__, "device": _CPU}
_FUNCTIONS: dict[str, Call] = {name: _resolve(name) for name in FUNCTIONS}
_METHODS: dict[str, Call] = {name: getattr(torch.Tensor, name) for name in METHODS if name != "to"} | {"to": _to}
