"""Prices: integers, versions by time, and a wrong list that is refused at start rather than at the first bill."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, strategies as st

from billing.prices import KINDS, STORAGE, PriceError, amount_nusd, load_prices, most_for_sample

NEW_YEAR = datetime(2026, 1, 1, tzinfo=UTC)


def version(name: str, start: datetime, price: Any = 1, **models: int) -> dict[str, Any]:
    prices = {"*": price, **models}
    return {
        "version": name,
        "effective_from": start,
        "models": {model: dict.fromkeys(KINDS, price) for model, price in prices.items()},
    }


@pytest.mark.parametrize(
    ("tokens", "uusd_per_mtok", "nusd"),
    [
        (1_000_000, 400_000, 400_000_000),  # $0.40
        (1, 400_000, 400),
        (1, 74_800, 75),  # 74.8
        (3, 74_800, 224),  # 224.4
        (1, 500, 1),  # 0.5: half up
        (1, 499, 0),
        (0, 400_000, 0),
        (10**12, 10**9, 10**18),
    ],
)
def test_amount(tokens: int, uusd_per_mtok: int, nusd: int) -> None:
    assert amount_nusd(tokens, uusd_per_mtok) == nusd


@given(st.integers(0, 10**12), st.integers(0, 10**12))
def test_an_amount_is_within_half_a_nano_dollar_of_the_exact_price(tokens: int, rate: int) -> None:
    amount = amount_nusd(tokens, rate)
    assert type(amount) is int
    assert -Fraction(1, 2) <= Fraction(tokens * rate, 1000) - amount <= Fraction(1, 2)


def test_the_default_list_prices_everything() -> None:
    prices = load_prices()
    rates = {kind: prices.rate("any/model", kind, NEW_YEAR).uusd for kind in KINDS}
    assert rates == {"train": 400_000, "prefill": 130_000, "cached_prefill": 26_000, "sample": 400_000}
    assert prices.rate("any/model", "train", NEW_YEAR).version == "default-2026-01"


def test_models_of_hosted_tinkers_list_cost_what_they_cost_there() -> None:
    prices, then = load_prices(), datetime(2026, 10, 7, tzinfo=UTC)
    rates = [
        prices.rate("openai/gpt-oss-120b", kind, then).uusd for kind in ("prefill", "cached_prefill", "sample", "train")
    ]
    assert rates == [330_000, 66_000, 840_000, 520_000]
    assert prices.rate("openai/gpt-oss-120b", "train", then).version == "default-2026-10"
    assert prices.rate("openai/gpt-oss-120b", "train", then - timedelta(seconds=1)).uusd == 400_000
    assert prices.rate("any/model", "train", then).uusd == 400_000
    nano, later = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", datetime(2026, 11, 23, tzinfo=UTC)
    assert [prices.rate(nano, kind, later).uusd for kind in KINDS] == [400_000, 195_000, 39_000, 495_000]
    assert [prices.rate("moonshotai/Kimi-K2.6", kind, later).uusd for kind in KINDS] == [
        4_400_000, 2_205_000, 441_000, 5_490_000,
    ]  # fmt: skip
    assert prices.rate(nano, "sample", later - timedelta(seconds=1)).uusd == 400_000
    assert prices.rate("openai/gpt-oss-120b", "train", later).uusd == 520_000


def test_the_version_in_force_and_the_named_model_win() -> None:
    later = NEW_YEAR + timedelta(days=31)
    prices = load_prices([version("b", later, 20, m=25), version("a", NEW_YEAR, 10)], now=later)
    almost = later - timedelta(microseconds=1)
    assert [prices.rate("m", "train", at).uusd for at in (NEW_YEAR, almost, later)] == [10, 10, 25]
    assert prices.rate("other", "train", later).uusd == 20
    assert prices.rate("m", "train", almost).version == "a"


def test_a_free_model_is_free() -> None:
    assert load_prices([version("a", NEW_YEAR, 10, m=0)]).rate("m", "sample", NEW_YEAR).uusd == 0


def test_before_the_first_version_there_is_no_price() -> None:
    with pytest.raises(PriceError, match="the first begin at 2026-01-01"):
        load_prices().rate("m", "train", NEW_YEAR - timedelta(seconds=1))


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(PriceError, match="'repose'"):
        load_prices().rate("m", "repose", NEW_YEAR)


def test_storage_is_priced_by_the_gigabyte_month() -> None:
    rate = load_prices().rate("any/model", STORAGE, NEW_YEAR)
    assert (rate.uusd, rate.amount_nusd(720 * 10**9), rate.amount_nusd(10**9)) == (100_000, 10**8, 138_889)
    assert load_prices([version("a", NEW_YEAR)]).rate("m", STORAGE, NEW_YEAR).uusd == 0


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([version("a", NEW_YEAR, 1.5)], r"models\.\*\.train: .*integer"),
        ([version("a", NEW_YEAR, "1")], r"models\.\*\.train: .*integer"),
        ([version("a", NEW_YEAR, True)], r"models\.\*\.train: .*integer"),
        ([version("a", NEW_YEAR, -1)], "greater than or equal to 0"),
        ([version("a", NEW_YEAR, 10**12 + 1)], "less than or equal"),
        ([version("a", NEW_YEAR.replace(tzinfo=None))], "effective_from: .*timezone"),
        ([version("a", NEW_YEAR) | {"models": {}}], r'needs prices for "\*"'),
        ([version("a", NEW_YEAR) | {"currency": "EUR"}], "currency"),
        ([version("a", NEW_YEAR) | {"models": {"*": {**dict.fromkeys(KINDS, 1), "smaple": 2}}}], "smaple"),
        ([version("a", NEW_YEAR), version("a", NEW_YEAR + timedelta(1))], "same name"),
        ([version("a", NEW_YEAR), version("b", NEW_YEAR)], "same effective_from"),
        ([version("a", datetime(2999, 1, 1, tzinfo=UTC))], "no prices are valid"),
    ],
)
def test_a_wrong_list_is_refused(tables: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(PriceError, match=message) as caught:
        load_prices(tables)
    assert "\n" not in str(caught.value)


def test_models_without_a_price_of_their_own_are_named() -> None:
    prices, now = load_prices(), datetime(2026, 12, 1, tzinfo=UTC)
    assert prices.unnamed(["Qwen/Qwen3-8B"], now) == ""
    assert prices.unnamed(["Qwen/Qwen3.8-27B", "Qwen/Qwen3-8B"], now).startswith(
        "Qwen/Qwen3.8-27B: no price of its own"
    )
    later = NEW_YEAR + timedelta(days=31)
    prices = load_prices([version("a", NEW_YEAR, m=2), version("b", later)], now=later)
    assert [prices.unnamed(["m"], at)[:2] for at in (NEW_YEAR - timedelta(1), NEW_YEAR, later)] == ["", "", "m:"]
    assert prices.unnamed(["z", "x", "y"], later).startswith("x, y, z: ")


@pytest.mark.parametrize(
    ("cached", "prompt", "samples", "new", "nusd"),
    [
        (500, 10, 4, 100, 336),  # 20 for the prompt, 15 for it again thrice, 300 drawn, and 1.5 for three roundings
        (4000, 10, 4, 100, 461),  # 40 where the cache is the dearer
        (500, 1, 1, 0, 3),
        (500, 0, 4, 0, 0),
    ],
)
def test_a_sample_is_held_at_its_dearest_and_no_more(
    cached: int, prompt: int, samples: int, new: int, nusd: int
) -> None:
    rates = {"train": 0, "prefill": 2000, "cached_prefill": cached, "sample": 3000}
    prices = load_prices([version("a", NEW_YEAR) | {"models": {"*": rates}}])
    assert most_for_sample(prices, "m", prompt, samples, new, NEW_YEAR) == nusd
