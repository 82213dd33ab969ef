"""Hostile graphs of uploaded losses, and what a loss may tell."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tinker.lib.public_interfaces.custom_loss import trace_loss
from weft.wire.checks.custom_cost import check_upload
from weft.wire.checks.custom_format import MAX_NODES, parse_custom_loss
from weft.wire.checks.custom_shapes import CustomLossError

from tests.workers.trainer.graphs import LP, OUT, RANKS_OF_PLACES, SUM, X, graph, node, ref, stored
from workers.trainer.losses.custom_graph import run_custom_loss

REFUSED = {
    "eval": graph(node("call_function", "x", "builtins.eval", "1"), SUM),
    "bare eval": graph(node("call_function", "x", "eval", "1"), SUM),
    "import": graph(node("call_function", "x", "builtins.__import__", "os"), SUM),
    "os": graph(node("call_function", "x", "os.system", "true"), SUM),
    "load": graph(node("call_function", "x", "torch.load", "/etc/passwd"), SUM),
    "ops": graph(node("call_function", "x", "torch.ops.aten.add", X, X), SUM),
    "class": graph(node("call_function", "x", "getattr", X, "__class__"), SUM),
    "computed attribute": graph(node("call_function", "x", "getattr", X, X), SUM),
    "three-argument getattr": graph(node("call_function", "x", "getattr", X, "shape", 1), SUM),
    "dunder method": graph(node("call_method", "x", "__reduce_ex__", X, 2), SUM),
    "in place": graph(node("call_method", "x", "add_", X, 1), SUM),
    "set": graph(node("call_method", "x", "set_", X, X), SUM),
    "numpy": graph(node("call_method", "x", "numpy", X), SUM),
    "apply": graph(node("call_method", "x", "apply_", X, "f"), SUM),
    "register_hook": graph(node("call_method", "x", "register_hook", X, "f"), SUM),
    "random": graph(node("call_function", "x", "torch.randn", 3), SUM),
    "matmul": graph(node("call_function", "x", "torch.matmul", X, X), SUM),
    "shift": graph(node("call_function", "x", "operator.lshift", 1, 10**9), SUM),
    "attrgetter": graph(node("call_function", "x", "operator.attrgetter", "__class__"), SUM),
    "out": graph(node("call_function", "x", "torch.exp", X, out=X), SUM),
    "module": graph(node("call_module", "x", "linear", X), SUM),
    "attribute": graph(node("get_attr", "x", "_tensor_constant0"), SUM),
    "later reference": graph(node("call_function", "x", "torch.exp", ref("loss")), SUM),
    "self reference": graph(node("call_function", "x", "torch.exp", ref("x")), SUM),
    "same name twice": graph(node("call_function", "logprobs", "torch.exp", X), SUM),
    "name with a path": graph(node("call_function", "../x", "torch.exp", X), SUM),
    "integer too large": graph(node("call_function", "x", "torch.full", [10**30], 1.0), SUM),
    "long text": graph(node("call_method", "x", "sum", X, "a" * 1000), SUM),
    "deep": graph(node("call_function", "x", "torch.tensor", [[[[[[[[1.0]]]]]]]]), SUM),
    "many arguments": graph(node("call_function", "x", "torch.tensor", [1.0] * 1000), SUM),
    "too many nodes": graph(*[node("call_function", f"n{i}", "torch.exp", X) for i in range(MAX_NODES)], SUM),
    "unknown tag": graph(node("call_function", "x", "torch.exp", {"code": "1"}), SUM),
    "dtype": graph(node("call_method", "x", "to", X, {"dtype": "complex64"}), SUM),
    "no output": graph(node("call_function", "x", "torch.exp", X), last=SUM),
    "format": {"format": 2, "nodes": [LP, OUT]},
    "loss is a number": graph(last=node("output", "output", "output", {"tuple": [1.0, {"dict": {}}]})),
    "metric name": graph(last=node("output", "output", "output", {"tuple": [X, {"dict": {"loss:sum": X}}]})),
    "no nodes": {"format": 1, "nodes": []},
    "nodes of the wrong kind": {"format": 1, "nodes": ["x", 3]},
}


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_graphs_are_refused_when_they_come(name: str) -> None:
    with pytest.raises(CustomLossError):
        parse_custom_loss("loss", [("logprobs", 1)], copy.deepcopy(REFUSED[name]))


FAILS = {
    "huge zeros": (graph(node("call_function", "x", "torch.zeros", [2**40]), SUM), "elements"),
    "huge by two": (graph(node("call_function", "x", "torch.ones", [2**30, 2**30]), SUM), "elements|overflow"),
    "huge view": (graph(node("call_method", "x", "expand", ref("logprobs"), 2**50, -1), SUM), "elements"),
    "huge repeat": (graph(node("call_method", "x", "repeat", X, 2**30), SUM), "elements"),
    "outer of outers": (
        graph(
            node("call_method", "a", "repeat", X, 4000),
            node("call_method", "b", "unsqueeze", ref("a"), 1),
            node("call_function", "x", "operator.mul", ref("a"), ref("b")),
            SUM,
        ),
        "elements",
    ),
    "indices": (
        graph(
            node("call_method", "a", "new_zeros", X, 2000, dtype={"dtype": "int64"}),
            node("call_method", "b", "unsqueeze", ref("a"), 1),
            node("call_function", "c", "operator.add", ref("a"), ref("b")),
            node("call_function", "x", "operator.getitem", X, ref("c")),
            SUM,
        ),
        "elements",
    ),
    "a range that runs backwards earns nothing": (
        graph(
            node("call_function", "a", "torch.arange", 0, -(2**50)),
            node("call_function", "b", "torch.arange", 0, -(2**50), 1),
            node("call_function", "x", "torch.zeros", 2**24),
            SUM,
        ),
        "from 0 to -1125899906842624",
    ),
    "power tower": (
        graph(
            node("call_function", "a", "operator.pow", 10, 64),
            node("call_function", "x", "operator.mul", X, ref("a")),
            SUM,
        ),
        "beyond",
    ),
    "tuples": (
        graph(
            node("call_function", "t0", "getattr", X, "shape"),
            *[node("call_function", f"t{i + 1}", "operator.add", ref(f"t{i}"), ref(f"t{i}")) for i in range(40)],
            node("call_function", "x", "torch.zeros", ref("t40")),
            SUM,
        ),
        "more than 128 values",
    ),
    "a slice of a slice of a list": (
        graph(
            node("call_method", "m", "unsqueeze", X, 0),
            node("call_function", "a", "operator.getitem", ref("m"), [0] * 120),
            node("call_function", "x", "operator.getitem", ref("a"), {"tuple": [[0] * 120]}),
            SUM,
        ),
        "for a list, name an input of integers, or stack",
    ),
    "a matrix's norm by its singular values": (
        graph(
            node("call_function", "a", "torch.outer", X, X),
            node("call_function", "loss", "torch.norm", ref("a"), "nuc"),
        ),
        "its argument p must be a number or 'fro', got 'nuc'",
    ),
    "the same by its largest": (
        graph(
            node("call_function", "a", "torch.outer", X, X),
            node("call_function", "loss", "torch._C._linalg.linalg_norm", ref("a"), 2),
        ),
        "ord is 2 over 2 dimensions",
    ),
    "where with many dimensions": (
        graph(
            *[node("call_method", f"d{i + 1}", "unsqueeze", ref(f"d{i}") if i else X, 0) for i in range(12)],
            node("call_function", "x", "torch.where", ref("d12")),
            SUM,
        ),
        "12 dimensions|9 dimensions; the limit is 8",
    ),
    "differences of differences": (
        graph(node("call_method", "x", "diff", X, n=10**6), SUM),
        "n is 1000000; differences are taken 0 to 4 times",
    ),
    "text times number": (graph(node("call_function", "x", "operator.mul", "a", 10**9), SUM), "arithmetic"),
    "list times number": (graph(node("call_function", "x", "operator.mul", [1], 10**9), SUM), "arithmetic"),
    "math of a tensor": (graph(node("call_function", "x", "math.exp", X), SUM), "must be a number, got a tensor"),
    "method of a number": (graph(node("call_method", "x", "sum", 3), SUM), "methods are called on tensors"),
    "where with one argument": (
        graph(node("call_function", "x", "torch.where", X), SUM),
        "the argument input is missing",
    ),
    "index out of range": (graph(node("call_function", "loss", "operator.getitem", X, 99)), "index 99"),
    "loss is no scalar": (graph(node("call_function", "loss", "torch.exp", X)), "must be a scalar"),
    "loss of integers": (graph(node("call_method", "loss", "argmax", X)), "must be floating point"),
    "deep memory": (
        graph(
            node("call_method", "n0", "repeat", X, 1000),
            *[node("call_function", f"n{i + 1}", "torch.exp", ref(f"n{i}")) for i in range(400)],
            node("call_method", "loss", "sum", ref("n400")),
        ),
        "elements",
    ),
}


@pytest.mark.parametrize("name", FAILS)
def test_hostile_graphs_fail_before_they_cost_anything(name: str) -> None:
    hostile, words = FAILS[name]
    loss = parse_custom_loss("loss", [("logprobs", 1)], copy.deepcopy(hostile))
    with pytest.raises(CustomLossError, match=words):
        run_custom_loss(loss, [torch.linspace(-2, -1, 8).requires_grad_()])


def growing(first: Any) -> dict[str, Any]:
    """A graph of tuples, each four times as large as the one before."""
    grown = [
        node("call_function", f"t{i + 1}", "operator.add", {"tuple": [ref(f"t{i}")] * 2}, {"tuple": [ref(f"t{i}")] * 2})
        for i in range(40)
    ]
    return graph(
        node("call_function", "t0", "operator.add", first, first), *grown, node("call_method", "loss", "sum", X)
    )


@pytest.mark.parametrize(
    "first", [{"tuple": [ref("logprobs")]}, {"tuple": [1]}, {"tuple": []}], ids=["tensors", "numbers", "nothing"]
)
def test_tuples_of_tuples_are_refused_when_they_come(first: Any) -> None:
    loss = parse_custom_loss("loss", [("logprobs", 1)], growing(first))
    with pytest.raises(CustomLossError, match=r"node t[0-9]+ .operator.add.: .*more than 128 values"):
        check_upload(loss)


@pytest.mark.parametrize(
    "picked",
    [
        lambda logprobs, places: logprobs[places],
        lambda logprobs, places: logprobs.gather(0, places),
        lambda logprobs, places: torch.index_select(logprobs, 0, places),
        lambda logprobs, places: torch.take_along_dim(logprobs, torch.abs(places), 0),
    ],
    ids=["index", "gather", "index_select", "take_along_dim"],
)
def test_an_input_may_be_an_index_if_it_comes_as_integers(picked: Any) -> None:
    """What type an input has is not known before its data come; that of log-probabilities is."""
    loss = stored(trace_loss(lambda logprobs, places: (picked(logprobs, places).sum(), {}), RANKS_OF_PLACES, "session"))
    check_upload(loss)
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    result, _ = run_custom_loss(loss, [logprobs, torch.tensor([2, 0, 2])])
    result.backward()
    assert result.item() == -7.0
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [1.0, 0.0, 2.0]
    with pytest.raises(CustomLossError, match="an index must be integers"):
        run_custom_loss(loss, [logprobs, torch.tensor([2.0, 0.0, 2.0])])
    floats = stored(
        trace_loss(lambda logprobs, places: (picked(logprobs, logprobs * places).sum(), {}), RANKS_OF_PLACES, "session")
    )
    with pytest.raises(CustomLossError, match="an index must be integers"):
        check_upload(floats)


def test_what_sizes_alone_make_impossible_is_left_to_the_data() -> None:
    fixed = graph(node("call_method", "a", "reshape", X, 5, 3), node("call_method", "loss", "sum", ref("a")))
    loss = parse_custom_loss("loss", [("logprobs", 1)], fixed)
    check_upload(loss)
    run_custom_loss(loss, [torch.linspace(-2, -1, 15)])
    with pytest.raises(CustomLossError, match=r"shape \[16\] cannot become \[5, 3\]"):
        run_custom_loss(loss, [torch.linspace(-2, -1, 16)])


def test_a_number_that_depends_on_a_mask() -> None:
    """A loss may compute with the count of a mask, but no tensor may have it as its size."""
    masked = [
        node("call_function", "m", "operator.gt", X, -1.5),
        node("call_function", "a", "operator.getitem", X, ref("m")),
        node("call_function", "shape", "getattr", ref("a"), "shape"),
        node("call_function", "n", "operator.getitem", ref("shape"), 0),
        node("call_function", "twice", "operator.mul", ref("n"), 2),
    ]
    mean = graph(*masked, node("call_function", "x", "operator.truediv", ref("a"), ref("twice")), SUM)
    inputs = torch.tensor([-1.0, -2.0, -1.25])
    found, _ = run_custom_loss(parse_custom_loss("loss", [("logprobs", 1)], mean), [inputs])
    assert float(found) == pytest.approx(-2.25 / 4)
    sized = graph(*masked, node("call_function", "x", "torch.zeros", ref("n")), SUM)
    with pytest.raises(CustomLossError, match="sizes that do not depend on the values of the data"):
        run_custom_loss(parse_custom_loss("loss", [("logprobs", 1)], sized), [inputs])
    power = [node("call_function", f"p{i + 1}", "operator.pow", ref(f"p{i}") if i else ref("n"), 64) for i in range(9)]
    tower = graph(*masked, *power, node("call_function", "x", "operator.mul", X, ref("p9")), SUM)
    with pytest.raises(CustomLossError, match=r"node p1 .*a number beyond 2.63"):
        run_custom_loss(parse_custom_loss("loss", [("logprobs", 1)], tower), [inputs])


SECRETS = {
    "an index": [
        node("call_function", "big", "operator.mul", X, -12345.0),
        node("call_method", "i", "long", ref("big")),
        node("call_function", "x", "operator.getitem", X, ref("i")),
    ],
    "a shape": [
        node("call_function", "m", "operator.lt", X, -1.4),
        node("call_function", "a", "operator.getitem", X, ref("m")),
        node("call_method", "b", "repeat", X, 2),
        node("call_function", "x", "operator.add", ref("a"), ref("b")),
    ],
}


@pytest.mark.parametrize("name", SECRETS)
def test_no_number_that_a_loss_computed_is_in_its_failure(name: str) -> None:
    """Torch would tell: index 12345 is out of bounds; the size of tensor a (5) must match."""
    loss = parse_custom_loss("loss", [("logprobs", 1)], graph(*SECRETS[name], SUM))
    said = []
    for shift in (0.0, 0.3):
        with pytest.raises(CustomLossError) as found:
            run_custom_loss(loss, [torch.linspace(-2, -1, 8) - shift])
        said.append(str(found.value))
    assert said[0] == said[1]
    assert "node x (operator." in said[0]
