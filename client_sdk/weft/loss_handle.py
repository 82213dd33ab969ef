"""`LossHandle`: a custom loss that torch.fx has traced, to be run by the server or, with the same result, by us.

A trace holds only calls of torch and math on the logprobs and loss inputs of one datum, so it can be sent as data. What
a trace cannot hold (branches on values, other libraries, captured tensors), or would change (a computation under
`torch.no_grad` would get a gradient), is refused when the loss is made.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weft.packages import imported
from weft.wire.binary.request_codec import as_decoded
from weft.wire.checks.batches import Reads, custom_problems
from weft.wire.checks.custom_format import INPUT_NAME, MAX_INPUTS, METRIC
from weft.wire.inputs import Datum
from weft.wire.losses import CustomLossGraph, CustomLossInput, CustomLossInputRank, CustomLossNode
from weft.wire.shown import arguments

if TYPE_CHECKING:
    import torch
    import torch.fx

#: (logprobs of a datum, its other inputs) -> (scalar loss, {"custom/<name>:sum" or ":mean": scalar})
PerDatumLoss = Callable[..., "tuple[torch.Tensor, Mapping[str, torch.Tensor]]"]

_MODULES = frozenset({"torch", "math", "operator", "_operator"})
#: Tensor methods that return something other than tensors, or run arbitrary code; the server refuses them.
_FORBIDDEN_METHODS = frozenset({"item", "numpy", "tolist", "backward"})


@dataclass(frozen=True)
class LossHandle:
    """A loss made by `ServiceClient.create_custom_loss`, for `forward_backward_custom` of the same session.

    `inputs` are `logprobs` and then the loss inputs it reads, with their ranks; `loss_id` is None if it runs here.
    """

    name: str
    inputs: tuple[CustomLossInput, ...]
    graph: torch.fx.GraphModule = field(repr=False, compare=False)
    session_id: str | None = None
    loss_id: str | None = None

    @property
    def reads(self) -> Reads:
        """The inputs that the loss reads from every datum, by name and rank."""
        return Reads(self.name, tuple((given.name, int(given.rank)) for given in self.inputs))

    def check(self, data: Sequence[Datum]) -> None:
        """`ValueError` unless every datum has each input, of its rank. `logprobs` is shaped as `target_tokens`."""
        for index, datum in enumerate(data):
            for problem in custom_problems(self.reads, as_decoded(datum).inputs):
                raise ValueError(f"data[{index}].{problem.where}: {problem.what}")

    def run(self, data: list[Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        """The sum of the losses of all data, and the metrics summed or averaged as their names say."""
        total: Any = 0.0
        sums: dict[str, float] = {}
        for datum, own in zip(data, logprobs, strict=True):
            loss, metrics = self.graph(own, *(datum.loss_fn_inputs[each.name].to_torch() for each in self.inputs[1:]))
            if loss.ndim != 0:
                raise ValueError(f"the loss {self.name!r} must be a scalar, got shape {tuple(loss.shape)}")
            total = total + loss
            for key, value in metrics.items():
                sums[key] = sums.get(key, 0.0) + float(value.detach())
        return total, {key: value / len(data) if key.endswith(":mean") else value for key, value in sums.items()}

    def encoded(self) -> CustomLossGraph:
        """The trace as plain data."""
        return CustomLossGraph(nodes=[_encode_node(node) for node in self.graph.graph.nodes])


#: torch.fx replaces functions of the whole process while it traces, so one trace runs at a time.
_TRACING = threading.Lock()


def trace(fn: PerDatumLoss, input_ranks: Mapping[str, CustomLossInputRank]) -> LossHandle:
    """Trace `fn`. `ValueError` if its parameters, or anything that it does, cannot be sent."""
    name = getattr(fn, "__name__", type(fn).__name__)
    inputs = _inputs(fn, name, input_ranks)
    with _TRACING:
        graph = _traced(fn, name)
        differs = _differ(fn, graph, [int(given.rank) for given in inputs])
    if differs:
        raise ValueError(
            f"custom loss {name}: its trace gives another loss or gradient than the function itself; leave out what"
            " differs by call or type (random numbers, isinstance), and what is written in place under two names"
        )
    return LossHandle(name, inputs, graph)


def _traced(fn: PerDatumLoss, name: str) -> torch.fx.GraphModule:
    """The trace of `fn`, checked: every node can be sent."""
    torch = _torch()

    class Tracer(torch.fx.Tracer):  # type: ignore[misc, name-defined]
        def create_node(self, *args: Any, **kwargs: Any) -> Any:
            node = super().create_node(*args, **kwargs)
            node.meta["has_gradient"] = torch.is_grad_enabled()
            return node

    tracer = Tracer()
    try:
        with torch.enable_grad():
            graph = tracer.trace(fn)
    except Exception as error:
        raise ValueError(
            f"custom loss {name}: torch.fx cannot trace it (does it branch on values?): {error}"
        ) from error
    for node in graph.nodes:
        wrong = _wrong_with(node)
        if wrong:
            raise ValueError(f"custom loss {name}: {wrong}")
    return torch.fx.GraphModule(tracer.root, graph, name)  # type: ignore[no-any-return]


def _differ(fn: PerDatumLoss, graph: torch.fx.GraphModule, ranks: Sequence[int]) -> bool:
    """True if the two functions give different losses, metrics or gradients on an example. False if `fn` does not
    accept the example's sizes or types: only the ranks of its inputs are known."""
    torch = _torch()
    generator = torch.Generator().manual_seed(0)
    given = [torch.rand((7, 3)[:rank], generator=generator) - 0.5 for rank in ranks]

    def found(loss_of: PerDatumLoss) -> list[Any]:
        logprobs, *others = (tensor.clone() for tensor in given)
        with torch.enable_grad():
            loss, metrics = loss_of(logprobs.requires_grad_().clone(), *others)
            return [loss, *torch.autograd.grad(loss, logprobs), *metrics.values()]

    try:
        wanted = found(fn)
    except Exception:
        return False
    try:
        pairs = zip(wanted, found(graph), strict=True)
        return not all(torch.allclose(own, traced, equal_nan=True) for own, traced in pairs)
    except Exception:
        return True


def _torch() -> Any:
    imported("torch.fx", "a custom loss is traced with torch: pip install torch")
    return importlib.import_module("torch")


def _inputs(fn: PerDatumLoss, name: str, ranks: Mapping[str, CustomLossInputRank]) -> tuple[CustomLossInput, ...]:
    parameters = list(inspect.signature(fn).parameters.values())
    names = [parameter.name for parameter in parameters]
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if names[:1] != ["logprobs"]:
        raise ValueError(f"custom loss {name}: its first parameter must be logprobs, then the loss inputs it reads")
    if len(names) > MAX_INPUTS:
        raise ValueError(f"custom loss {name}: {len(names)} parameters, the limit is {MAX_INPUTS} with logprobs")
    for parameter in parameters:
        if not INPUT_NAME.fullmatch(parameter.name):
            raise ValueError(
                f"custom loss {name}: parameter {parameter.name!r} must be in lower case, at most 64 characters"
            )
        if parameter.kind not in plain or parameter.default is not parameter.empty:
            raise ValueError(f"custom loss {name}: parameter {parameter.name!r} must be positional, without a default")
    if not isinstance(ranks, Mapping) or set(ranks) != set(names):
        raise ValueError(f"custom loss {name}: input_ranks must be a dict of {', '.join(names)}; got {ranks!r:.200}")
    if ranks["logprobs"] == 0:
        raise ValueError(f"custom loss {name}: logprobs have rank 1 ([T]) or 2 ([T, K]), not 0")
    with arguments(rank="input_ranks"):
        return tuple(CustomLossInput(name=each, rank=ranks[each]) for each in names)


def _wrong_with(node: torch.fx.Node) -> str | None:
    """Why a node cannot be sent."""
    target: Any = node.target
    if not node.meta["has_gradient"]:
        where = "under torch.no_grad, or in an autograd.Function"
        return f"it computes {node.name!r} {where}, which a trace does not hold; use .detach()"
    if node.op == "call_function":
        module = str(getattr(target, "__module__", None) or "")
        if target is not builtins.getattr and module.split(".")[0] not in _MODULES:
            return (
                f"it calls {getattr(target, '__qualname__', target)!r} of {module!r}; only torch and math may be called"
            )
    elif node.op == "call_method":
        if target in _FORBIDDEN_METHODS:
            return f"it calls {target}(); keep every value a tensor, and leave the backward pass to the service"
        if not hasattr(_torch().Tensor, target):
            return f"it calls {target!r}, which tensors do not have"
    elif node.op == "call_module":
        return f"it calls the module {target!r}; use functions such as those of torch.nn.functional"
    elif node.op == "get_attr":
        return f"it holds the tensor {target!r}; it may only read logprobs and the loss inputs that it names"
    elif node.op == "output":
        return _wrong_with_output(node.args[0])
    return None


def _wrong_with_output(output: Any) -> str | None:
    node = _torch().fx.Node
    if not isinstance(output, tuple | list) or len(output) != 2 or not isinstance(output[0], node):
        return "it must return (loss, metrics), the loss as a tensor"
    if not isinstance(output[1], dict):
        return "its metrics must be a dict"
    for key, value in output[1].items():
        if not isinstance(key, str) or not METRIC.fullmatch(key):
            return f"metric {key!r} must be named custom/<name>:sum or custom/<name>:mean, in lower case"
        if not isinstance(value, node):
            return f"metric {key!r} must be a tensor"
    return None


def _encode_node(node: torch.fx.Node) -> CustomLossNode:
    return CustomLossNode(
        op=node.op,
        name=node.name,
        target=_qualified(node.target) if node.op == "call_function" else str(node.target),
        args=[_encode(arg) for arg in node.args],
        kwargs={key: _encode(arg) for key, arg in node.kwargs.items()},
    )


def _qualified(target: Any) -> str:
    """A function's public name; Python's operators live in `_operator` but are known as `operator`."""
    name = importlib.import_module("torch.fx.node")._get_qualified_name(target)
    return str(name).replace("_operator.", "operator.", 1) if str(name).startswith("_operator.") else str(name)


def _encode(arg: Any) -> Any:
    """An argument as JSON; `weft.wire.losses` says how."""
    torch = _torch()
    if isinstance(arg, torch.fx.Node):
        return {"ref": arg.name}
    if isinstance(arg, float) and not math.isfinite(arg):
        return {"float": str(arg)}
    if arg is None or isinstance(arg, bool | int | float | str):
        return arg
    if isinstance(arg, tuple):
        return {"tuple": [_encode(each) for each in arg]}
    if isinstance(arg, list):
        return [_encode(each) for each in arg]
    if isinstance(arg, Mapping):
        return {"dict": {str(key): _encode(each) for key, each in arg.items()}}
    if isinstance(arg, slice):
        return {"slice": [_encode(each) for each in (arg.start, arg.stop, arg.step)]}
    if arg is Ellipsis:
        return {"ellipsis": True}
    for kind in ("dtype", "device", "layout", "memory_format"):
        if isinstance(arg, getattr(torch, kind)):
            return {kind: str(arg).removeprefix("torch.")}
    raise ValueError(f"a custom loss cannot send an argument of type {type(arg).__name__}")
