"""No step is taken without a gradient that its client counts on. Clients submit forward_backward and optim_step
together, so the step is on its way before anybody knows that the first has failed, be it that its data are refused or
that its gradient comes out as infinite. And whoever has been told, and goes on, is not stopped."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import tinker
import weft
from tinker import types

from tests.e2e.conftest import BASE_MODEL, Weftd

pytestmark = pytest.mark.server
Official = Callable[..., Any]

#: One batch is refused before it is queued; the other fails while it is computed.
BAD = {"refused": ([10_000_000], [1.0]), "computed": ([52], [3.4e38])}
PARTS = {"alone": 0, "amid a large batch": 1024}


def good(token: int = 51, kind: Any = weft) -> Any:
    return datum(kind, [token], [1.0])


def datum(kind: Any, targets: list[int], weights: list[float]) -> Any:
    where = kind if kind is weft else types
    inputs = {"target_tokens": targets, "weights": weights}
    return where.Datum(model_input=where.ModelInput.from_ints([50]), loss_fn_inputs=inputs)


class Ours:
    """The few calls that the tests need, with either client."""

    kind: Any = weft
    adam: Any = staticmethod(weft.AdamParams)
    failed: Any = weft.RequestFailedError
    missing: Any = weft.GradientMissingError

    def __init__(self, run: Any) -> None:
        self.run = run

    def backward(self, data: list[Any]) -> Any:
        return self.run.forward_backward(data, "cross_entropy")

    def step(self, rate: float = 1e-2) -> Any:
        return self.run.optim_step(self.adam(learning_rate=rate))

    def loss(self) -> float:
        loss: float = self.run.forward([good(53, self.kind)], "cross_entropy").result(60).metrics["loss:sum"]
        return loss

    def steps(self) -> float:
        metrics = self.step(0.0).result(60).metrics
        assert metrics is not None
        return float(metrics["step:max"])


class Theirs(Ours):
    kind = tinker
    adam = staticmethod(types.AdamParams)
    failed = tinker.RequestFailedError
    missing = tinker.RequestFailedError


@pytest.fixture(params=[Ours, Theirs])
def client(request: pytest.FixtureRequest, weftd: Weftd, official: Official) -> Any:
    if request.param is Theirs:
        yield Theirs(official("careless").create_lora_training_client(BASE_MODEL, rank=4).result())
    else:
        with weft.ServiceClient(base_url=weftd.url, api_key=weftd.key("careless")) as service:
            yield Ours(service.create_lora_training_client(BASE_MODEL, rank=4))


@pytest.mark.parametrize("around", PARTS)
@pytest.mark.parametrize("how", BAD)
def test_a_step_behind_it_is_not_taken_once(client: Ours, how: str, around: str) -> None:
    client.backward([good(kind=client.kind)])
    client.step().result(60)  # gives the optimizer momentum
    before = client.loss()
    others = [good(kind=client.kind)] * PARTS[around]
    backward, step = client.backward([*others, datum(client.kind, *BAD[how]), *others]), client.step()
    with pytest.raises(client.failed):
        backward.result(60)
    with pytest.raises(client.missing, match=r"no step was taken.*its gradient is missing.*dat(um|a) \d"):
        step.result(60)
    assert client.loss() == before
    client.backward([good(kind=client.kind)])
    client.step().result(60)
    assert client.steps() == 3


@pytest.mark.parametrize("how", BAD)
@pytest.mark.parametrize(("before", "behind"), [(0, 1), (0, 5), (1, 3)])
def test_microbatches_that_were_submitted_with_it_do_not_make_up_for_it(
    client: Ours, how: str, before: int, behind: int
) -> None:
    """The step is refused also if its client learns of the failure while it still sends them."""
    loss = client.loss()
    data = [good(kind=client.kind)] * before + [datum(client.kind, *BAD[how])] + [good(kind=client.kind)] * behind
    microbatches, step = [client.backward([one]) for one in data], client.step()
    with pytest.raises(client.missing, match="its gradient is missing"):
        step.result(60)
    for index, microbatch in enumerate(microbatches):
        with pytest.raises(client.failed) if index == before else nullcontext():
            microbatch.result(60)
    assert client.loss() == loss


@pytest.mark.parametrize("how", BAD)
def test_who_waits_for_each_microbatch_may_leave_one_out(client: Ours, how: str) -> None:
    for one in [good(kind=client.kind), datum(client.kind, *BAD[how]), good(kind=client.kind)]:
        with suppress(client.failed):
            client.backward([one]).result(60)
    client.step().result(60)
    assert client.steps() == 2


@pytest.mark.parametrize("how", BAD)
def test_who_was_told_and_goes_on_is_not_stopped(client: Ours, how: str) -> None:
    """Data may be corrected and sent again, or the failed batch left out."""
    for _ in range(2):
        with pytest.raises(client.failed):
            client.backward([datum(client.kind, *BAD[how])]).result(60)
    client.backward([good(kind=client.kind)])
    client.step().result(60)
    assert client.steps() == 2


@pytest.mark.parametrize("how", BAD)
def test_the_same_step_again_is_taken(client: Ours, how: str) -> None:
    """The gradient of the good data is still there."""
    before = client.loss()
    client.backward([good(53, client.kind)]).result(60)
    bad, step = client.backward([datum(client.kind, *BAD[how])]), client.step()
    with pytest.raises(client.failed):
        bad.result(60)
    with pytest.raises(client.missing):
        step.result(60)
    client.step().result(60)
    assert client.loss() < before


@pytest.mark.parametrize("client", [Ours], indirect=True)
def test_a_step_that_counts_on_weights_which_were_not_loaded_is_not_taken(client: Ours) -> None:
    before = client.loss()
    load = client.run.load_state(f"tinker://{client.run.model_id}/weights/nobody")
    client.backward([good(53, client.kind)])
    with pytest.raises(client.missing, match=r"a load_state before it failed.*nobody"):
        client.step().result(60)
    with pytest.raises((weft.WeftError, tinker.TinkerError), match="nobody"):
        load.result(60)
    assert client.loss() == before
    client.step().result(60)  # by the gradient on the weights that the run has
    assert client.loss() < before


def test_who_was_told_that_weights_were_not_loaded_goes_on_without(client: Ours) -> None:
    with pytest.raises((weft.WeftError, tinker.TinkerError), match="nobody"):
        client.run.load_state(f"tinker://{client.run.model_id}/weights/nobody").result(60)
    client.backward([good(kind=client.kind)])
    client.step().result(60)
