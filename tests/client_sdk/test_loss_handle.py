"""Traced losses: what is sent, what is refused, and that a trace computes what the function does."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from starlette.responses import JSONResponse, Response
from weft import Datum, LossHandle, ModelInput, ServiceClient, WeftError
from weft.loss_handle import trace

from tests.client_sdk.stub_server import SESSION, Asked, Stub


def nll(logprobs: Any, weights: Any) -> Any:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/nll:sum": loss, "custom/lp:mean": logprobs.mean()}


RANKS: dict[str, Any] = {"logprobs": 1, "weights": 1}


def datum(*targets: int) -> Datum:
    return Datum(ModelInput.from_ints(list(targets)), {"target_tokens": list(targets), "weights": [0.5] * len(targets)})


def test_a_trace_as_data() -> None:
    nodes = trace(nll, RANKS).encoded().model_dump()["nodes"]
    assert [(node["op"], node["target"]) for node in nodes] == [
        ("placeholder", "logprobs"),
        ("placeholder", "weights"),
        ("call_function", "operator.mul"),
        ("call_method", "sum"),
        ("call_function", "operator.neg"),
        ("call_method", "mean"),
        ("output", "output"),
    ]
    assert nodes[2]["args"] == [{"ref": "logprobs"}, {"ref": "weights"}]
    [output] = nodes[-1]["args"]
    assert output["tuple"][1] == {"dict": {"custom/nll:sum": {"ref": "neg"}, "custom/lp:mean": {"ref": "mean"}}}


def test_arguments_that_are_not_json() -> None:
    def fn(logprobs: Any) -> Any:
        clipped = torch.clamp(logprobs, min=-math.inf, max=None)[..., 1:]
        return clipped.to(torch.float64).sum(dim=(0,)).sum(), {}

    nodes = trace(fn, {"logprobs": 2}).encoded().model_dump()["nodes"]
    text = str(nodes)
    for piece in ("{'float': '-inf'}", "{'ellipsis': True}", "{'slice': [1, None, None]}", "{'dtype': 'float64'}"):
        assert piece in text
    assert "{'tuple': [0]}" in text
    assert "'max': None" in text


def branching(logprobs: Any) -> Any:
    return (logprobs.sum() if logprobs.sum() > 0 else -logprobs.sum()), {}


@torch.inference_mode()
def ratio_of(logprobs: Any, weights: Any) -> Any:
    return torch.exp(logprobs - weights)


def without_gradient(logprobs: Any, weights: Any) -> Any:
    with torch.no_grad():
        ratio = torch.exp(logprobs - weights)
    return -(ratio * logprobs).sum(), {}


class Straight(torch.autograd.Function):
    """A function with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return torch.exp(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def under_two_names(logprobs: Any, weights: Any) -> Any:
    total = torch.zeros_like(weights)
    same = total
    same += logprobs
    return (total * weights).sum(), {}


#: Losses whose traces would compute something else than they do here.
OTHERWISE: dict[str, tuple[Callable[..., Any], str]] = {
    "no_grad": (
        without_gradient,
        r"computes 'sub' under torch\.no_grad, or in an autograd\.Function.*use \.detach\(\)",
    ),
    "inference_mode": (lambda logprobs, weights: ((ratio_of(logprobs, weights) * logprobs).sum(), {}), "'sub' under"),
    "function": (lambda logprobs, weights: (Straight.apply(logprobs).sum(), {}), "in an autograd.Function"),
    "isinstance": (
        lambda logprobs, weights: (logprobs.sum() * isinstance(weights, torch.Tensor), {}),
        "its trace gives",
    ),
    "random": (lambda logprobs, weights: (logprobs.sum() * torch.rand(1).item(), {}), "its trace gives another loss"),
    "in place": (under_two_names, "another loss or gradient than the function"),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_a_trace_holds_otherwise_is_refused(name: str) -> None:
    """It would be trained with another gradient, and nobody would be told."""
    fn, says = OTHERWISE[name]
    with pytest.raises(ValueError, match=says):
        trace(fn, RANKS)


def test_what_is_written_in_place_under_one_name_and_what_asks_for_other_types_is_taken() -> None:
    def summed(logprobs: Any, weights: Any) -> Any:
        total = torch.zeros_like(logprobs)
        total += logprobs
        return total.gather(0, weights).sum(), {}

    with torch.no_grad():  # around the call, not within the loss
        assert len(trace(summed, RANKS).graph.graph.nodes) == 7


CAPTURED = torch.ones(1)
BAD: dict[str, tuple[Any, dict[str, Any]]] = {
    "cannot trace": (branching, {"logprobs": 1}),
    "first parameter": (lambda lp: (lp.sum(), {}), {"lp": 1}),
    "without a default": (lambda logprobs, scale=1.0: (logprobs.sum(), {}), {"logprobs": 1, "scale": 0}),
    "positional": (lambda logprobs, *rest: (logprobs.sum(), {}), {"logprobs": 1, "rest": 1}),
    "input_ranks": (nll, {"logprobs": 1}),
    "rank 1": (lambda logprobs: (logprobs.sum(), {}), {"logprobs": 0}),
    "lower case": (lambda logprobs, Weights: (logprobs.sum(), {}), {"logprobs": 1, "Weights": 1}),
    "item()": (lambda logprobs: (logprobs.sum(), {"custom/x:sum": logprobs.sum().item()}), {"logprobs": 1}),
    "backward()": (lambda logprobs: (logprobs.sum(), {"custom/x:sum": logprobs.sum().backward()}), {"logprobs": 1}),
    "must be a tensor": (lambda logprobs: (logprobs.sum(), {"custom/x:sum": 1.0}), {"logprobs": 1}),
    "custom/<name>": (lambda logprobs: (logprobs.sum(), {"loss:sum": logprobs.sum()}), {"logprobs": 1}),
    "return": (lambda logprobs: logprobs.sum(), {"logprobs": 1}),
    "tensors do not have": (lambda logprobs: (logprobs.nonsense(), {}), {"logprobs": 1}),
    "holds the tensor": (lambda logprobs: ((logprobs * CAPTURED).sum(), {}), {"logprobs": 1}),
}


@pytest.mark.parametrize("says", BAD)
def test_refused_where_it_is_made(says: str) -> None:
    fn, ranks = BAD[says]
    with pytest.raises(ValueError, match=says.replace("(", r"\(").replace(")", r"\)")):
        trace(fn, ranks)


def test_run_by_the_client(service: ServiceClient, stub: Stub) -> None:
    handle = service.create_custom_loss(nll, RANKS).result(10)
    assert (handle.name, handle.loss_id, handle.session_id) == ("nll", None, SESSION)
    run = service.create_lora_training_client("org/tiny", rank=8)
    output = run.forward_backward_custom([datum(1, 2), datum(3)], handle).result(10)
    # The stub's logprobs are minus the targets.
    assert output.metrics["loss:sum"] == 3.0
    assert output.metrics["custom/nll:sum"] == 3.0
    assert output.metrics["custom/lp:mean"] == (-1.5 - 3) / 2
    assert "/create_custom_loss" not in stub.paths()


def test_run_by_the_server(service: ServiceClient, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.config = {"custom_loss_server_side": True}

    def made(asked: Asked) -> Response:
        return stub.promise("loss", asked.json["custom_loss_seq_id"], JSONResponse({"loss_id": "L7"}))

    monkeypatch.setattr(stub, "on_create_custom_loss", made, raising=False)
    handle: LossHandle = service.create_custom_loss(nll, RANKS).result(10)
    service.create_custom_loss(nll, RANKS).result(10)
    assert handle.loss_id == "L7"
    first, second = stub.bodies("/create_custom_loss")
    assert (first["custom_loss_seq_id"], second["custom_loss_seq_id"]) == (0, 1)
    assert first["inputs"] == [{"name": "logprobs", "rank": 1}, {"name": "weights", "rank": 1}]
    assert first["graph"]["format"] == 1
    run = service.create_lora_training_client("org/tiny", rank=8)
    run.forward_backward_custom([datum(1)], handle).result(10)
    from weft.wire.binary.train_codec import decode_train_request

    [sent] = [decode_train_request(asked.body) for asked in stub.asked if asked.path == "/forward_backward"]
    assert (sent.loss_fn, sent.loss_fn_config) == ("custom", {"loss_id": "L7"})


def test_data_that_do_not_fit_the_loss(service: ServiceClient) -> None:
    handle = service.create_custom_loss(nll, RANKS).result(10)
    run = service.create_lora_training_client("org/tiny", rank=8)
    with pytest.raises(ValueError, match=r"data\[1\].*the loss 'nll' reads 'weights'"):
        run.forward_backward_custom([datum(1), Datum(ModelInput.from_ints([1]), {"target_tokens": [1]})], handle)
    wide = Datum(ModelInput.from_ints([1]), {"target_tokens": np.ones((1, 2), int), "weights": np.ones((1, 2))})
    with pytest.raises(ValueError, match=r"data\[0\].*has shape \(1, 2\), the loss 'nll' declared rank 1"):
        run.forward_backward_custom([wide], handle)


def test_a_gradient_of_the_users_that_is_not_finite_is_told_as_theirs(service: ServiceClient) -> None:
    """The server would report weights that the user never gave."""

    def loss(data: list[Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        return logprobs[0].sum() + (logprobs[1] - logprobs[1].detach()).sqrt().sum(), {}

    run = service.create_lora_training_client("org/tiny", rank=8).result(10)
    says = r"^datum 1: the gradient of your loss is inf at element 0 of its logprobs; it must be finite$"
    with pytest.raises(WeftError, match=says):
        run.forward_backward_custom([datum(1, 2), datum(5)], loss).result(10)


@pytest.mark.parametrize("constant", [lambda lp: lp.detach().sum(), lambda lp: lp.new_ones(())])
def test_a_loss_that_does_not_depend_on_the_logprobs_is_told_so(
    service: ServiceClient, constant: Callable[[Any], Any]
) -> None:
    """torch's error was "element 0 of tensors does not require grad"."""
    run = service.create_lora_training_client("org/tiny", rank=8).result(10)
    with pytest.raises(WeftError, match="does not depend on the logprobs, so there is no gradient: compute it from"):
        run.forward_backward_custom([datum(1, 2)], lambda _data, logprobs: (constant(logprobs[0]), {})).result(10)


def test_threads_of_a_process_trace_at_once() -> None:
    def many_nodes(logprobs: Any, weights: Any) -> Any:
        for _ in range(100):
            logprobs = logprobs.sort(dim=0)[0]
        return (logprobs * weights).sum(), {}

    with ThreadPoolExecutor(8) as pool:
        losses = list(pool.map(lambda _: trace(many_nodes, {"logprobs": 1, "weights": 1}), range(64)))
    assert {len(loss.graph.graph.nodes) for loss in losses} == {205}
