"""A forward_backward that the server refuses is not followed by an optimizer step without its gradient."""

from __future__ import annotations

import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import weft
from weft.future import APIFuture
from weft.types import AdamParams, Datum, ModelInput

from tests.client_sdk.stub_server import Stub, status

DATA = [Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [1, 2], "weights": [1.0, 1.0]})]
ADAM = AdamParams(learning_rate=0.1)
MANY = 16


def test_a_step_after_a_refused_gradient_is_not_sent(service: weft.ServiceClient, stub: Stub) -> None:
    run = service.create_lora_training_client("org/tiny", rank=8)
    stub.faults["/forward_backward"] = [status(400, "data[0]: token 99 is out of the vocabulary")]
    backward, step = run.forward_backward(DATA, "cross_entropy"), run.optim_step(ADAM)
    with pytest.raises(weft.BadRequestError):
        backward.result(10)
    with pytest.raises(weft.GradientMissingError, match=r"not sent.*token 99 is out of the vocabulary"):
        step.result(10)
    assert stub.bodies("/optim_step") == []
    run.forward_backward(DATA, "cross_entropy")
    run.optim_step(ADAM).result(10)
    [sent] = stub.bodies("/optim_step")
    assert sent["seq_id"] == 3  # the refused one used its number, the step that was not sent has none


def test_gradients_that_threads_add_at_the_same_moment_are_all_counted_on(
    service: weft.ServiceClient, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_there, start = threading.Barrier(MANY), APIFuture.start

    def together(work: Coroutine[Any, Any, Any]) -> Any:
        with suppress(threading.BrokenBarrierError):
            all_there.wait(0.3)
        return start(work)

    run = service.create_lora_training_client("org/tiny").result()
    stub.faults["/forward_backward"] = [status(400, "bad") for _ in range(MANY)]
    with monkeypatch.context() as patched, ThreadPoolExecutor(MANY) as threads:
        patched.setattr(APIFuture, "start", together)
        refused = list(threads.map(lambda _: run.forward_backward(DATA, "cross_entropy"), range(MANY)))
    for told in refused[1:]:
        with pytest.raises(weft.BadRequestError):
            told.result(10)
    run.forward_backward(DATA, "cross_entropy").result(10)
    with pytest.raises(weft.GradientMissingError):  # nobody has been told of the first yet
        run.optim_step(ADAM).result(10)


def test_a_refused_forward_takes_no_gradient_away(service: weft.ServiceClient, stub: Stub) -> None:
    run = service.create_lora_training_client("org/tiny", rank=8)
    run.forward_backward(DATA, "cross_entropy").result(10)
    stub.faults["/forward_backward"] = [status(400, "no")]
    with pytest.raises(weft.BadRequestError):
        run.forward(DATA, "cross_entropy").result(10)
    run.optim_step(ADAM).result(10)
    assert len(stub.bodies("/optim_step")) == 1
