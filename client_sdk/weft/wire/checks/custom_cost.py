"""What an uploaded loss will do on one datum, node by node, and what that costs: known before anything is computed.

The API asks when data come that are to be trained with a loss, and the trainer before it runs one. A datum has budgets,
so a loss costs no more than a multiple of its data; and its work counts in the fair order, so that whoever sends an
expensive loss waits for it, not the neighbours. The unit of work is about what a token of training costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.wire.binary.train_codec import ArrayDatum
from weft.wire.checks.custom_format import CustomLoss, Node
from weft.wire.checks.custom_index import indexed
from weft.wire.checks.custom_names import DTYPES, FUNCTIONS, METHODS, Form, Parameter
from weft.wire.checks.custom_rules import RULES
from weft.wire.checks.custom_shapes import (
    MAX_DIMS,
    MAX_LEAVES,
    CustomLossError,
    Device,
    Dtype,
    Given,
    Shape,
    Unfit,
    Unknown,
    is_number,
    leaves,
    number,
)

#: How many elements the nodes of one datum may read and write together: per position of the datum, and in addition.
ELEMENTS_PER_POSITION = 1024
ELEMENTS_FREE = 65_536
#: How much work one datum may cost. Each node counts as one, and so do this many elements of an addition. One unit
#: takes some 50 microseconds.
ELEMENTS_PER_WORK = 16_384
#: Work of all data of one operation.
MAX_WORK = 2**18
#: How many nodes are planned, over data of different sizes, to find the cost of one operation: some 50 ms. Data beyond
#: that count as the most that their size allows.
MOST_NODES = 4096
DEAREST = max(form.cost for forms in (*FUNCTIONS.values(), *METHODS.values()) for form in forms)

#: Keywords that say where a tensor lies, which the server decides, and keywords known to have no effect.
PLACES = frozenset({"device", "layout", "memory_format", "pin_memory", "requires_grad", "out", "inplace"})
_ALIASES = {"axis": "dim", "self": "input", "A": "input", "x": "input"}
_SILENT = frozenset({"size_average", "reduce"})


@dataclass(frozen=True)
class DatumPlan:
    """`values` by node: the shapes of tensors, and what is no tensor as it is. `work` is what the datum costs."""

    values: Mapping[str, Any]
    work: int


def plan_datum(loss: CustomLoss, inputs: Sequence[Shape]) -> DatumPlan:
    """`inputs` in the order of `loss.inputs`. Raises CustomLossError naming the node that is not possible."""
    budget = _Budget(_budget_of(inputs))
    values: dict[str, Any] = {}
    given = iter(inputs)
    for node in loss.nodes:
        if node.op == "placeholder":
            values[node.name] = next(given)
            continue
        try:
            values[node.name] = _planned(node, values, budget)
        except CustomLossError as error:
            raise type(error)(f"{named(loss, node)}: {error}") from None
    for what, name in (("the loss", loss.loss), *loss.metrics.items()):
        _check_scalar(values[name], f"custom loss {loss.name!r}: {what}")
    if values[loss.loss].kind not in "fu":
        raise CustomLossError(f"custom loss {loss.name!r}: the loss must be floating point")
    return DatumPlan(values, budget.work)


def check_upload(loss: CustomLoss) -> None:
    """Refuse a loss that no data could make possible: raises CustomLossError naming the node. Sizes and types that
    depend on the data are not judged here."""
    (_, rank), *others = loss.inputs
    try:
        plan_datum(loss, [Shape((64,) * rank), *(Shape((64,) * rank, "u") for _, rank in others)])
    except Unfit:
        return


def work_of(loss: CustomLoss, data: Sequence[ArrayDatum]) -> list[int]:
    """The work of each datum, or somewhat more: data of about one size are planned once, the largest of them. Raises
    CustomLossError naming datum and node for data that the loss is not possible with."""
    sizes = [input_shapes(loss, datum) for datum in data]
    alike: dict[tuple[Any, ...], list[int]] = {}
    for index, shapes in enumerate(sizes):
        alike.setdefault(tuple((s.kind, *(d.bit_length() for d in s.dims)) for s in shapes), []).append(index)
    work = [0] * len(sizes)
    for planned, indices in enumerate(alike.values()):
        largest = max(indices, key=lambda index: sum(shape.elements for shape in sizes[index]))
        try:
            exactly = planned * len(loss.nodes) < MOST_NODES
            most = plan_datum(loss, sizes[largest]).work if exactly else most_work(loss, sizes[largest])
        except CustomLossError as error:
            raise CustomLossError(f"datum {largest}: {error}") from None
        for index in indices:
            work[index] = most
    if sum(work) > MAX_WORK:
        raise CustomLossError(
            f"custom loss {loss.name!r} has {len(loss.nodes)} nodes, and would be {sum(work)} of work on {len(data)} "
            f"data; the limit is {MAX_WORK} for one operation: send fewer data in each, or a loss of fewer nodes"
        )
    return work


def most_work(loss: CustomLoss, shapes: Sequence[Shape]) -> int:
    """The most work that a datum of this size can be."""
    return len(loss.nodes) + -(-_budget_of(shapes) * DEAREST // ELEMENTS_PER_WORK)


def input_shapes(loss: CustomLoss, datum: ArrayDatum) -> list[Shape]:
    """The shapes of the inputs that `loss` reads from a datum, which `weft.wire.checks.batches` has checked."""
    arrays = [datum.inputs[name] for name, _ in loss.inputs[1:]]
    kinds = ["b" if array.dtype == bool else "f" if array.dtype.kind == "f" else "i" for array in arrays]
    found = [
        Shape(array.shape if rank else (), kind)
        for array, kind, (_, rank) in zip(arrays, kinds, loss.inputs[1:], strict=True)
    ]
    return [Shape(datum.inputs["target_tokens"].shape), *found]


def _budget_of(shapes: Sequence[Shape]) -> int:
    return ELEMENTS_FREE + ELEMENTS_PER_POSITION * max((shape.elements for shape in shapes), default=0)


def named(loss: CustomLoss, node: Node) -> str:
    return f"custom loss {loss.name!r}, node {node.name} ({node.target})"


def _check_scalar(value: Any, what: str) -> None:
    if not isinstance(value, Shape):
        raise CustomLossError(f"{what} must be a scalar tensor, got {_told(value)}")
    if value.dims:
        raise Unfit(f"{what} must be a scalar tensor, got {_told(value)}")


class _Budget:
    def __init__(self, elements: int) -> None:
        self.limit = self.left = elements
        self._nodes, self._elements = 0, 0

    def spend(self, elements: int, cost: int) -> None:
        self._nodes += 1
        self._elements += elements * cost
        self.left -= max(1, elements)
        if self.left < 0:
            raise Unfit(
                f"it would bring the elements computed for this datum above {self.limit} "
                f"({ELEMENTS_PER_POSITION} for each position and {ELEMENTS_FREE} on top)"
            )

    @property
    def work(self) -> int:
        return self._nodes + -(-self._elements // ELEMENTS_PER_WORK)


def _planned(node: Node, values: Mapping[str, Any], budget: _Budget) -> Any:
    args = [decoded(arg, values, _SYMBOLS) for arg in node.args]
    kwargs = {key: decoded(arg, values, _SYMBOLS) for key, arg in (node.kwargs or {}).items() if key not in PLACES}
    if node.op == "call_method" and not (args and isinstance(args[0], Shape)):
        raise CustomLossError("methods are called on tensors")
    if leaves([*args, *kwargs.values()]) > MAX_LEAVES:
        raise CustomLossError(f"more than {MAX_LEAVES} values in its arguments, those of tuples included")
    found, cost = _result(node, args, kwargs)
    if leaves(found) > MAX_LEAVES:
        raise CustomLossError(
            f"it gives a tuple of more than {MAX_LEAVES} values, those of tuples inside of it included"
        )
    budget.spend(sum(map(_elements, (found, *args, *kwargs.values()))), cost)
    return found


def _result(node: Node, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, int]:
    """The result of a node, and how much one element of it costs."""
    if node.target == "getattr":
        return _attribute(args[0], args[1]), 1
    if node.target == "operator.add" and all(isinstance(arg, tuple) for arg in args):
        return sum(args, ()), 1
    forms = (FUNCTIONS if node.op == "call_function" else METHODS)[node.target]
    if node.target == "operator.getitem" and len(args) == 2:
        _check_dims(found := indexed(*args))
        return found, forms[0].cost
    if not any(map(_holds_tensor, (*args, *kwargs.values()))) and node.target.startswith(("operator.", "math.")):
        if kwargs or len(args) != len(forms[0].parameters) or not all(map(is_number, args)):
            raise CustomLossError("arithmetic takes tensors and numbers; math functions take numbers")
        return number(node.target, args), 1
    form, given = _bound(forms, args, kwargs)
    found = RULES[form.rule](given)
    if isinstance(dtype := given.get("dtype"), Dtype):
        found = replace(found, kind=dtype.kind)
    _check_dims(found)
    return found, form.cost


def _check_dims(found: Any) -> None:
    if isinstance(found, Shape) and len(found.dims) > MAX_DIMS:
        raise CustomLossError(f"it gives a tensor of {len(found.dims)} dimensions; the limit is {MAX_DIMS}")


def _elements(value: Any) -> int:
    if isinstance(value, Shape):
        return value.elements
    return sum(map(_elements, value)) if isinstance(value, tuple | list) else 0


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, Shape) or (isinstance(value, tuple | list) and any(map(_holds_tensor, value)))


def _attribute(value: Any, name: str) -> Any:
    if name in ("values", "indices"):
        if not (isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, Shape) for part in value)):
            raise CustomLossError("only the result of a reduction along a dimension has values and indices")
        return value[0 if name == "values" else 1]
    if not isinstance(value, Shape):
        raise CustomLossError(f"only tensors have {name}")
    if name in ("shape", "ndim"):
        return RULES["size" if name == "shape" else "ndim"]({"input": value})
    if name in ("dtype", "device"):
        return Dtype(value.kind) if name == "dtype" else Device()
    return RULES["transpose"]({"input": value})


# ---- arguments


def _bound(forms: Sequence[Form], args: list[Any], kwargs: dict[str, Any]) -> tuple[Form, Given]:
    """The first form of the operation that takes these arguments, and the arguments by parameter name."""
    args = [arg for arg in args if not isinstance(arg, Device)]
    told = ""
    for form in forms:
        try:
            return form, _by_name(form, args, kwargs)
        except CustomLossError as error:
            told = told or str(error)
    raise CustomLossError(told)


def _by_name(form: Form, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    left = list(args)
    for parameter in form.parameters:
        if not left or parameter.by_name:
            break
        if parameter.kinds == "S" and isinstance(left[0], int) and not isinstance(left[0], bool):
            count = next((at for at, arg in enumerate(left) if not _is_integer(arg)), len(left))
            one_by_one = parameter is form.parameters[-1] or form.parameters[-1].kinds == "t"
            given[parameter.name] = tuple(left[: count if one_by_one else 1])
            del left[: count if one_by_one else 1]
        else:
            given[parameter.name] = left.pop(0)
    if any(arg is not None for arg in left):
        raise CustomLossError(f"it takes {len(form.parameters)} arguments, and has {len(args)}")
    known = {parameter.name: parameter for parameter in form.parameters}
    for key, value in kwargs.items():
        name = key if key in known else _ALIASES.get(key, key)
        if name not in known and not (key in _SILENT and value is None) and value is not None:
            raise CustomLossError(f"the argument {key} is not one that a custom loss may give")
        if name in known and given.get(name) is not None:
            raise CustomLossError(f"the argument {key} is given twice")
        if name in known:
            given[name] = value
    given = {name: value for name, value in given.items() if value is not None}
    for parameter in form.parameters:
        _check(parameter, given)
    return given


def _check(parameter: Parameter, given: Given) -> None:
    value = given.get(parameter.name)
    if value is None:
        if not parameter.optional:
            raise CustomLossError(f"the argument {parameter.name} is missing")
    elif not any(_CHECKS[kind](value) for kind in parameter.kinds):
        takes = " or ".join(_KINDS[kind] for kind in parameter.kinds)
        raise CustomLossError(f"its argument {parameter.name} must be {takes}, got {_told(value)}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_integers(value: Any) -> bool:
    return _is_integer(value) or (isinstance(value, tuple | list) and all(map(_is_integer, value)))


def _are_numbers(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_are_numbers, value))
    return isinstance(value, bool | int | float)


def _are_tensors(value: Any) -> bool:
    return isinstance(value, tuple | list) and bool(value) and all(isinstance(item, Shape) for item in value)


_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "x": lambda value: isinstance(value, Shape),
    "n": is_number,
    "i": _is_integer,
    "b": lambda value: isinstance(value, bool),
    "t": lambda value: isinstance(value, Dtype),
    "s": lambda value: isinstance(value, str),
    "d": _are_integers,
    "S": _are_integers,
    "L": _are_tensors,
    "N": _are_numbers,
    "o": lambda value: value == "fro" or is_number(value),
}
_KINDS = {
    "x": "a tensor",
    "n": "a number",
    "i": "an integer that does not depend on the values of the data",
    "b": "True or False",
    "t": "a dtype",
    "s": "a text",
    "d": "one dimension or several",
    "S": "sizes that do not depend on the values of the data",
    "L": "tensors",
    "N": "numbers",
    "o": "a number or 'fro'",
}


def _told(value: Any) -> str:
    if isinstance(value, Shape):
        return f"a tensor of shape {list(value.dims)}"
    if isinstance(value, Unknown):
        return "a number that depends on the values of the data"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value)[:40] if is_number(value) or isinstance(value, str) else type(value).__name__


_SYMBOLS: Mapping[str, Any] = {"dtype": lambda name: Dtype(DTYPES[name]), "device": Device()}


def decoded(arg: Any, values: Mapping[str, Any], symbols: Mapping[str, Any]) -> Any:
    """An argument decoded from its wire form. References are looked up in `values`; `symbols` has the values for dtypes
    and for the device."""
    if isinstance(arg, list):
        return [decoded(item, values, symbols) for item in arg]
    if not isinstance(arg, Mapping):
        return arg
    ((kind, content),) = arg.items()
    if kind == "ref":
        return values[content]
    if kind == "tuple":
        return tuple(decoded(item, values, symbols) for item in content)
    if kind == "slice":
        return slice(*(decoded(item, values, symbols) for item in content))
    if kind == "float":
        return float(content)
    if kind == "dtype":
        return symbols["dtype"](content)
    if kind == "ellipsis":
        return ...
    return symbols["device"] if kind == "device" else None


def is_computed(value: Any) -> bool:
    """True if a planned value has to be computed: it is a tensor, depends on the data, or is given by torch."""
    if isinstance(value, tuple | list):
        return any(map(is_computed, value))
    return isinstance(value, Shape | Unknown | Dtype | Device)
