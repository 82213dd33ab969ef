"""An uploaded loss as plain data: read, and checked against the list of what it may do.

Called by the API when a loss is created and when data are trained with it, and by the trainer before it runs one. No
torch here. A graph is a straight line of nodes: each may only refer to nodes before it, so it always ends.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.wire.checks.batches import Reads
from weft.wire.checks.custom_names import ATTRIBUTES, DTYPES, FUNCTIONS, METHODS
from weft.wire.checks.custom_shapes import CustomLossError
from weft.wire.shown import quote

MAX_INPUTS = 16
MAX_NODES = 512
MAX_METRICS = 64
#: How many values the arguments of one node may hold, and how deep they may nest.
MAX_VALUES, MAX_DEPTH = 128, 6
MAX_TEXT = 128
#: Keywords that functions of torch.nn.functional pass on; their values may only say that nothing is written in place.
WRITING = ("out", "inplace")
MAX_INTEGER = 2**53

INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_NODE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")


@dataclass(frozen=True)
class Node:
    """`args` and `kwargs` stay in their wire form, checked. `op` is placeholder, call_function or call_method."""

    op: str
    name: str
    target: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class CustomLoss:
    """`inputs` are (name, rank) in the order of the placeholders, `logprobs` first. `loss` names the node that is the
    loss of a datum, `metrics` the nodes that are its metrics."""

    name: str
    inputs: tuple[tuple[str, int], ...]
    nodes: tuple[Node, ...]
    loss: str
    metrics: Mapping[str, str]

    @property
    def reads(self) -> Reads:
        return Reads(self.name, self.inputs)


def parse_custom_loss(name: str, inputs: Sequence[tuple[str, int]], graph: Mapping[str, Any]) -> CustomLoss:
    """Read the parts of a create_custom_loss request. Raises CustomLossError."""
    if not (0 < len(name) <= MAX_TEXT and name.isprintable()):
        raise CustomLossError(f"name: must be 1 to {MAX_TEXT} printable characters")
    _check_inputs(inputs)
    if graph.get("format") != 1:
        raise CustomLossError(f"graph.format: must be 1, got {quote(graph.get('format'))}")
    raw = graph.get("nodes")
    if not isinstance(raw, list) or not 1 <= len(raw) <= MAX_NODES:
        count = len(raw) if isinstance(raw, list) else 0
        raise CustomLossError(f"graph.nodes: {count} nodes; a loss has 1 to {MAX_NODES}")
    nodes: list[Node] = []
    seen: set[str] = set()
    for index, item in enumerate(raw[:-1]):
        node = _node(item, seen, index)
        nodes.append(node)
        seen.add(node.name)
    placeholders = [node.target for node in nodes if node.op == "placeholder"]
    if placeholders != [name for name, _ in inputs]:
        raise CustomLossError(f"graph: its placeholders are {placeholders}, its inputs {[name for name, _ in inputs]}")
    loss, metrics = _output(raw[-1], seen)
    return CustomLoss(name, tuple((name, rank) for name, rank in inputs), tuple(nodes), loss, metrics)


def encode_custom_loss(name: str, inputs: Sequence[tuple[str, int]], graph: Mapping[str, Any]) -> bytes:
    """The stored form of a loss that `parse_custom_loss` has accepted."""
    return json.dumps({"name": name, "inputs": [list(pair) for pair in inputs], "graph": graph}).encode()


def decode_custom_loss(stored: bytes) -> CustomLoss:
    """The inverse; everything is checked again."""
    found = json.loads(stored)
    return parse_custom_loss(found["name"], [(name, rank) for name, rank in found["inputs"]], found["graph"])


def _check_inputs(inputs: Sequence[tuple[str, int]]) -> None:
    names = [name for name, _ in inputs]
    if not 1 <= len(names) <= MAX_INPUTS or names[0] != "logprobs" or len(set(names)) != len(names):
        raise CustomLossError(f"inputs: must be 1 to {MAX_INPUTS} different names, logprobs first; got {names[:20]}")
    for name, rank in inputs:
        if INPUT_NAME.fullmatch(name) is None or rank not in (0, 1, 2):
            raise CustomLossError(f"inputs: {quote(name)} of rank {rank}: lowercase names, and rank 0, 1 or 2")
    if inputs[0][1] == 0:
        raise CustomLossError("inputs: logprobs has rank 1 ([T]) or 2 ([T, K])")


def _node(item: Any, seen: set[str], index: int) -> Node:
    if not isinstance(item, Mapping):
        raise CustomLossError(f"graph.nodes.{index}: must be an object")
    op, name, target = (item.get(key) for key in ("op", "name", "target"))
    where = f"graph node {quote(name)}"
    if not isinstance(name, str) or _NODE_NAME.fullmatch(name) is None or name in seen:
        raise CustomLossError(f"{where}: names must be different identifiers of at most 128 characters")
    if not isinstance(target, str):
        raise CustomLossError(f"{where}: target must be a text")
    if op == "placeholder":
        return Node("placeholder", name, target)
    if op not in ("call_function", "call_method"):
        raise CustomLossError(f"{where}: {quote(op)} is not possible here; a loss may call functions and methods only")
    allowed = FUNCTIONS if op == "call_function" else METHODS
    if target not in allowed:
        what = "function" if op == "call_function" else "method"
        raise CustomLossError(f"{where}: the {what} {quote(target)} is not one that a custom loss may call")
    args, kwargs = item.get("args") or [], item.get("kwargs") or {}
    if not isinstance(args, list) or not isinstance(kwargs, Mapping):
        raise CustomLossError(f"{where}: args must be a list and kwargs an object")
    budget = [MAX_VALUES]
    for value in [*args, *kwargs.values()]:
        _check_value(value, seen, where, budget, MAX_DEPTH)
    for key, value in kwargs.items():
        writes = key in WRITING and value is not None and value is not False
        if not isinstance(key, str) or INPUT_NAME.fullmatch(key.lower()) is None or writes:
            raise CustomLossError(f"{where}: the keyword {quote(key)} is not possible here")
    if target == "getattr" and (len(args) != 2 or args[1] not in list(ATTRIBUTES)):
        raise CustomLossError(f"{where}: getattr reads {', '.join(sorted(ATTRIBUTES))}, not {quote(args[1:])}")
    return Node(op, name, target, tuple(args), dict(kwargs))


def _check_value(value: Any, seen: set[str], where: str, budget: list[int], depth: int) -> None:
    budget[0] -= 1
    if budget[0] < 0 or depth == 0:
        raise CustomLossError(
            f"{where}: more than {MAX_VALUES} values in its arguments, or nested deeper than {MAX_DEPTH}"
        )
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, int | float):
        if abs(value) > MAX_INTEGER if isinstance(value, int) else not math.isfinite(value):
            raise CustomLossError(f"{where}: the number {quote(value)} is out of range")
    elif isinstance(value, str):
        if len(value) > MAX_TEXT:
            raise CustomLossError(f"{where}: a text of {len(value)} characters; the limit is {MAX_TEXT}")
    elif isinstance(value, list):
        for item in value:
            _check_value(item, seen, where, budget, depth - 1)
    elif isinstance(value, Mapping) and len(value) == 1:
        ((kind, content),) = value.items()
        _check_tagged(kind, content, seen, where, budget, depth)
    else:
        raise CustomLossError(f"{where}: an argument is neither a plain value nor an object of one key")


def _check_tagged(kind: str, content: Any, seen: set[str], where: str, budget: list[int], depth: int) -> None:
    if kind == "ref":
        good = isinstance(content, str) and content in seen
    elif kind == "tuple":
        good = isinstance(content, list)
    elif kind == "slice":
        good = isinstance(content, list) and len(content) == 3
    elif kind == "float":
        good = content in ("inf", "-inf", "nan")
    elif kind == "dtype":
        good = isinstance(content, str) and content in DTYPES
    elif kind == "ellipsis":
        good = content is True
    else:  # where a tensor lies is the server's decision
        good = kind in ("device", "layout", "memory_format") and isinstance(content, str) and len(content) <= MAX_TEXT
    if not good:
        raise CustomLossError(f"{where}: the argument {quote({kind: content})} is not known, or names a later node")
    if kind in ("tuple", "slice"):
        for item in content:
            _check_value(item, seen, where, budget, depth - 1)


def _output(item: Any, seen: set[str]) -> tuple[str, dict[str, str]]:
    if not isinstance(item, Mapping) or item.get("op") != "output" or len(item.get("args") or []) != 1:
        raise CustomLossError("graph: its last node must be the output, of one argument")
    pair = _unwrapped(item["args"][0], "tuple")
    if not isinstance(pair, list) or len(pair) != 2:
        raise CustomLossError("graph: a loss returns (loss, metrics)")
    metrics = _unwrapped(pair[1], "dict")
    if not isinstance(metrics, Mapping) or len(metrics) > MAX_METRICS:
        raise CustomLossError(f"graph: the metrics must be a dict of at most {MAX_METRICS}")
    for key in metrics:
        if not isinstance(key, str) or METRIC.fullmatch(key) is None:
            raise CustomLossError(f"graph: metric {quote(key)}: must be named custom/<name>:sum or custom/<name>:mean")
    return _reference(pair[0], seen, "the loss"), {
        key: _reference(value, seen, f"metric {key}") for key, value in metrics.items()
    }


def _unwrapped(value: Any, kind: str) -> Any:
    return value[kind] if isinstance(value, Mapping) and list(value) == [kind] else value


def _reference(value: Any, seen: set[str], what: str) -> str:
    name = _unwrapped(value, "ref")
    if not isinstance(value, Mapping) or not isinstance(name, str) or name not in seen:
        raise CustomLossError(f"graph: {what} must be a tensor that the graph computes, got {quote(value)}")
    return name
