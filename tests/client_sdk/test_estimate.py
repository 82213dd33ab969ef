"""Prices of plans: the arithmetic of billing, request by request."""

from __future__ import annotations

import pytest
import weft
from hypothesis import given, strategies as st
from weft import AdamParams, Datum, ModelInput, Plan, PlannedSample, PlannedTrain, PlannedUpdate
from weft.money import amount_nusd, usd
from weft.plan.estimate import estimate
from weft.types import LimitsResponse, LossLimits, ModelLimits, PricesResponse, SamplingParams

from billing.prices import amount_nusd as billed_nusd

RATES = {"train": 400_001, "prefill": 130_003, "cached_prefill": 26_007, "sample": 400_009}
PRICES = PricesResponse(base_model="org/tiny", price_version="v", rates_uusd_per_mtok=RATES)
LIMITS = LimitsResponse(
    models={"org/tiny": ModelLimits(vocab_size=1000, context_length=64)},
    losses={"cross_entropy": LossLimits(required=["target_tokens", "weights"], multi_target=True)},
    chunk_data=2,
)


def datum(length: int) -> Datum:
    inputs = {"target_tokens": [1] * length, "weights": [1.0] * length}
    return Datum(model_input=ModelInput.from_ints([1] * length), loss_fn_inputs=inputs)


@given(st.integers(0, 10**12), st.integers(0, 10**12))
def test_amounts_are_those_of_billing(tokens: int, rate: int) -> None:
    assert amount_nusd(tokens, rate) == billed_nusd(tokens, rate)


def test_training_is_exact_and_rounded_once_per_request() -> None:
    plan = Plan("org/tiny", [PlannedTrain([datum(3), datum(4), datum(5)]), PlannedUpdate(AdamParams())], times=10)
    priced = estimate(plan, PRICES, LIMITS)
    [row] = priced.rows
    assert (row.kind, row.tokens) == ("train", 120)
    assert row.amount_nusd == 10 * (billed_nusd(7, 400_001) + billed_nusd(5, 400_001))
    assert priced.exact
    assert priced.total_nusd == row.amount_nusd
    assert priced.total_usd == usd(row.amount_nusd)


def test_forward_is_prefill_and_a_custom_loss_is_both() -> None:
    steps = [PlannedTrain([datum(3)], forward_only=True), PlannedTrain([datum(4)], lambda data, logprobs: None)]
    tokens = {row.kind: row.tokens for row in estimate(Plan("org/tiny", steps), PRICES, LIMITS).rows}
    assert tokens == {"prefill": 7, "train": 4}


def test_sampling_is_bounded_by_tokens_and_context() -> None:
    def rows(**fields: object) -> dict[str, int]:
        step = PlannedSample(**({"prompts": [[1] * 10, ModelInput.from_ints([1] * 60)], "num_samples": 4} | fields))  # type: ignore[arg-type]
        priced = estimate(Plan("org/tiny", [step]), PRICES, LIMITS)
        assert not priced.exact
        return {row.kind: row.tokens for row in priced.rows}

    params = SamplingParams(max_tokens=8)
    assert rows(sampling_params=params) == {"prefill": 70, "cached_prefill": 210, "sample": 4 * (8 + 5)}
    assert rows(sampling_params={"max_tokens": 8}, expected_tokens=3)["sample"] == 4 * 6
    assert rows()["sample"] == 4 * (55 + 5)


def test_an_unknown_model_is_no_price() -> None:
    with pytest.raises(weft.WeftError, match="org/tiny"):
        estimate(Plan("x", [PlannedSample([[1]])]), PRICES.model_copy(update={"base_model": "x"}), LIMITS)
