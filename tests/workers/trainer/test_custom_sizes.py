"""Sizes predicted for an uploaded loss are those that torch then makes: every operation listed, in every form."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from weft.wire.checks.custom_format import parse_custom_loss
from weft.wire.checks.custom_names import FUNCTIONS, METHODS, Form
from weft.wire.checks.custom_shapes import CustomLossError

from workers.trainer.losses.custom_graph import run_custom_loss

INPUTS: dict[str, torch.Tensor] = {
    "logprobs": -torch.rand(3, 4),
    "x": torch.rand(3, 4),
    "v": torch.rand(4),
    "w": torch.rand(4),
    "s": torch.tensor(0.5),
    "i": torch.tensor([[0, 1, 2, 1], [1, 0, 0, 2], [2, 2, 1, 0]]),
    "j": torch.tensor([1, 0, 2]),
    "m": torch.tensor([[True, False, True, False], [True, True, False, False], [False, False, True, True]]),
}
RANKS = {name: tensor.ndim for name, tensor in INPUTS.items()}
#: The values that are tried for each kind of parameter. Tensors come as references.
TRIED: dict[str, list[Any]] = {
    "x": [{"ref": name} for name in ("x", "v", "s", "i", "j", "m")],
    "n": [2, 0.5],
    "i": [0, 1, -1, 2],
    "b": [True],
    "t": [{"dtype": "float64"}],
    "s": ["trunc", "none", "sum", "tanh", "constant", "linear"],
    "d": [1, {"tuple": [0, 1]}],
    "S": [
        {"tuple": [1, 1]},
        {"tuple": [3, 4]},
        {"tuple": [12]},
        {"tuple": [4, -1]},
        {"tuple": [2, 3, 4]},
        {"tuple": [0, 1]},
    ],
    "L": [[{"ref": "x"}, {"ref": "i"}], [{"ref": "v"}, {"ref": "w"}, {"ref": "v"}]],
    "N": [[[1.0, 2.0], [3.0, 4.0]], 3],
    "o": ["fro", 1],
}
MOST = 400
CALLS = [("call_function", name, form) for name in sorted(FUNCTIONS) for form in FUNCTIONS[name]] + [
    ("call_method", name, form) for name in sorted(METHODS) for form in METHODS[name]
]


def arguments(form: Form) -> list[tuple[list[Any], dict[str, Any]]]:
    """Each combination of required arguments; and each optional one beside some of them, by name and by its place."""
    must = [each for each in form.parameters if not each.optional]
    tried = [[value for kind in each.kinds for value in TRIED[kind]] for each in must]
    required = list(product(*tried))[:MOST]
    placed = sum(not each.by_name for each in must)
    names = [each.name for each in must[placed:]]
    found: list[tuple[list[Any], dict[str, Any]]] = [
        (list(values[:placed]), dict(zip(names, values[placed:], strict=True))) for values in required
    ]
    behind = next((each for each in form.parameters if each.optional and not each.by_name), None)
    for args, kwargs in found[:40]:
        for each in form.parameters:
            values = [value for kind in each.kinds for value in TRIED[kind]] if each.optional else []
            found += [(args, {**kwargs, each.name: value}) for value in values]
            found += [([*args, value], kwargs) for value in values if each is behind]
    return found


def graph(op: str, target: str, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A graph of the call, with a loss beside it that is always possible."""
    places = [{"op": "placeholder", "name": name, "target": name, "args": [], "kwargs": {}} for name in INPUTS]
    out = {"tuple": [{"ref": "loss"}, {"dict": {}}]}
    return {
        "format": 1,
        "nodes": [
            *places,
            {"op": op, "name": "called", "target": target, "args": args, "kwargs": kwargs},
            {"op": "call_method", "name": "loss", "target": "sum", "args": [{"ref": "logprobs"}], "kwargs": {}},
            {"op": "output", "name": "output", "target": "output", "args": [out], "kwargs": {}},
        ],
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("op", "name", "form"), CALLS, ids=[f"{op}-{name}-{form.rule}" for op, name, form in CALLS])
def test_sizes_are_those_that_torch_gives(op: str, name: str, form: Form) -> None:
    """`run_custom_loss` refuses a result of another size than planned; and some way to call the operation must work."""
    said: list[str] = []
    for args, kwargs in arguments(form):
        loss = parse_custom_loss("loss", list(RANKS.items()), graph(op, name, args, kwargs))
        try:
            run_custom_loss(loss, list(INPUTS.values()))
            said.append("")
        except CustomLossError as error:
            said.append(str(error))
    assert not [error for error in said if "an error of the server's" in error]
    assert "" in said, said[0]
