"""What DPO reads and computes from log-probabilities, compared with torch's own gradient."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from weft import rl
from weft.rl.supervised.dpo import _sums
from weft.wire.account.limits import PricesResponse
from weft.wire.inputs import Datum, ModelInput
from weft.wire.tensor import TensorData

from tests.client_sdk.rl.kit import Scripted, tokenizer
from tests.client_sdk.rl.test_refused import Priced


def test_a_long_answers_sum_loses_no_digit() -> None:
    """The reference's sum is a Python float: if both models are one, float32's rounding would look like a margin."""
    lp = -np.random.default_rng(0).exponential(2.0, 4000).astype(np.float32)
    weights = (np.arange(4000) >= 100).astype(np.float32)
    datum = Datum(ModelInput.from_ints([1] * 4000), {"weights": TensorData.from_numpy(weights)})
    (found,) = _sums([datum], [{"logprobs": TensorData.from_numpy(lp)}])
    assert found == pytest.approx(math.fsum(lp[100:].tolist()), abs=1e-9)


def lps(tokens: list[int], modulus: int) -> list[float]:
    """Logprobs of each token but the first."""
    return [-(token * place % modulus) / modulus for place, token in enumerate(tokens)][1:]


class Trained(Priced):
    """Stands for a run and for a reference, with logprobs of their own; `sent` is what got a gradient."""

    model_id = "run"

    def __init__(self, modulus: int) -> None:
        super().__init__(Scripted(), None)
        self.modulus, self.asked, self.sent = modulus, 0, list[Datum]()

    async def get_prices(self, base_model: str) -> PricesResponse:
        """50 nano-dollars for each token that is read, ten for one that is drawn, a hundred for one that is trained."""
        rates: dict[Any, int] = {"prefill": 50_000, "sample": 10_000, "train": 100_000}
        return PricesResponse(base_model=base_model, price_version="1", rates_uusd_per_mtok=rates)

    async def compute_logprobs_async(self, whole: ModelInput) -> list[float | None]:
        self.asked += 1
        return [None, *lps(whole.to_ints(), self.modulus)]

    def forward(self, data: list[Datum], loss: str) -> Any:
        found = [np.asarray(lps(whole(datum), self.modulus), np.float32) for datum in data]
        outputs = [{"logprobs": TensorData.from_numpy(each)} for each in found]
        return SimpleNamespace(result=lambda: SimpleNamespace(loss_fn_outputs=outputs))

    def forward_backward(self, data: list[Datum], loss: str) -> Any:
        assert loss == "cross_entropy"
        self.sent += data
        return SimpleNamespace(result=lambda: None)

    def optim_step(self, params: Any) -> Any:
        return SimpleNamespace(result=lambda: SimpleNamespace(metrics={}))

    def log(self, numbers: Any, step: int) -> None: ...


def whole(datum: Datum) -> list[int]:
    return [*datum.model_input.to_ints(), int(datum.loss_fn_inputs["target_tokens"].to_numpy()[-1])]


def test_each_pair_is_pulled_as_far_as_torch_says_and_its_reference_is_asked_once() -> None:
    """Once the run has moved away from its reference, pairs weigh differently; at its first step all weigh the same."""
    run, base, beta = Trained(7), Trained(13), 0.5
    texts = [("it rains", "it is 6"), ("it is 7", "it rains twice"), ("it is 8", "it rains"), ("it is 9", "it pours")]
    rows = [{"prompt": f"{n} + 5", "chosen": one, "rejected": other} for n, (one, other) in enumerate(texts, 1)]
    pairs = rl.pairs(rows, tokenizer())
    given: dict[str, Any] = {"reference": base, "beta": beta, "batch": 4, "epochs": 2, "sinks": []}
    report = rl.dpo(cast(Any, run), pairs, **given)

    leaves, h = dict[int, torch.Tensor](), list[torch.Tensor]()
    for pair in pairs:
        apart = []
        for datum in pair.data:
            weights = torch.tensor(datum.loss_fn_inputs["weights"].to_numpy()).double()
            lp = torch.tensor(lps(whole(datum), 7), dtype=torch.float64, requires_grad=True)
            leaves[id(datum.model_input)] = lp
            apart.append((weights * (lp - torch.tensor(lps(whole(datum), 13)))).sum())
        h.append(beta * (apart[0] - apart[1]))
    margins = torch.stack(h)
    loss = -torch.nn.functional.logsigmoid(margins).mean()
    loss.backward()

    assert [base.asked, len(run.sent), len(report.steps)] == [8, 16, 2]
    for datum in run.sent:
        grad = leaves[id(datum.model_input)].grad
        assert grad is not None
        np.testing.assert_allclose(-datum.loss_fn_inputs["weights"].to_numpy(), grad, rtol=1e-5, atol=1e-9)
    lengths = [len(whole(datum)) for pair in pairs for datum in pair.data]
    bill = sum(50 * length + 10 + 2 * 150 * (length - 1) for length in lengths)
    assert bill <= report.spent_nusd <= bill + 4 * 24  # what rounding may add to each request
    told = {"loss": loss.item(), "accuracy": (margins > 0).double().mean().item(), "margin": margins.mean().item()}
    assert 0 < told["accuracy"] < 1
    assert {name: report.steps[-1][name] for name in told} == pytest.approx(told, rel=1e-5)
