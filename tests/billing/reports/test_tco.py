"""Every figure of the comparison of owned and hosted RL that `billing.reports.tco` follows, from its inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import mean

import pytest

from billing.reports.tco import Server, break_even_tokens_per_s, divide, pool_usd, usd_per_mtok
from store.settings import OwnershipSettings


@dataclass(frozen=True)
class Rates:
    """A hosted price list, dollars per Mtok."""

    prefill: float
    sample: float
    train: float


@dataclass(frozen=True)
class Bill:
    """What a hosted service asks for one step."""

    prefill_usd: float
    sample_usd: float
    train_usd: float
    tokens: float  # trained

    @property
    def usd(self) -> float:
        return self.prefill_usd + self.sample_usd + self.train_usd

    @property
    def usd_per_mtok(self) -> float:
        return usd_per_mtok(self.usd, self.tokens)

    def sampled_for(self, acceptance: float) -> Bill:
        """The bill of the same step if only this share of the samples is trained on, and all are paid for."""
        sampled = (self.prefill_usd / acceptance, self.sample_usd / acceptance)
        return replace(self, prefill_usd=sampled[0], sample_usd=sampled[1])


def hosted(rates: Rates, rollouts: int, prompt: float, response: float, sequence: float) -> Bill:
    """One step of `rollouts` sequences: prompts once as prefill, responses as samples, whole sequences as training."""
    prefill, sample, train = (
        rollouts * tokens * rate / 1e6
        for tokens, rate in ((prompt, rates.prefill), (response, rates.sample), (sequence, rates.train))
    )
    return Bill(prefill, sample, train, rollouts * sequence)


RATES = Rates(prefill=0.68, sample=1.70, train=2.04)
GPU_HOUR = 1.59

#: (response, sequence, seconds) of each step; 64 rollouts on 96 GPUs.
SLIME = [
    (11128, 19702, 593.4), (13227, 21473, 479.2), (10946, 19777, 518.9), (12691, 20357, 479.2), (13644, 20628, 426.4),
    (12185, 21004, 522.1), (12766, 20257, 555.3), (12718, 21383, 523.7), (11203, 19127, 374.4), (10451, 17228, 527.1),
    (12896, 19333, 455.4), (11696, 19603, 457.8), (10273, 19183, 433.1), (13168, 20730, 513.4), (12864, 21939, 481.5),
    (12852, 20193, 423.5), (11590, 18860, 620.7), (13847, 21686, 508.9), (11630, 19900, 496.1), (12856, 20922, 454.4),
]  # fmt: skip
SLIME_PRINTED = [
    3.30, 3.35, 3.28, 3.36, 3.39, 3.31, 3.36, 3.33, 3.32, 3.34, 3.40, 3.33, 3.27, 3.37, 3.32, 3.37, 3.35, 3.37, 3.32,
    3.35,
]  # fmt: skip
#: (prompt, response, sequence, seconds) of each step; 512 rollouts on 256 GPUs.
PRIME = [
    (3629, 10203, 13833, 371), (5141, 11898, 17039, 479), (5689, 12317, 18006, 529), (5118, 13042, 18160, 544),
    (5394, 13360, 18755, 587), (6904, 12851, 19755, 656), (5897, 13116, 19013, 632), (5272, 13418, 18691, 608),
    (6892, 13569, 20461, 688), (5971, 13262, 19233, 663),
]  # fmt: skip
PRIME_OWN = [
    (41.93, 5.92), (54.16, 6.21), (59.77, 6.48), (61.46, 6.61), (66.34, 6.91), (74.22, 7.34), (71.45, 7.34),
    (68.74, 7.18), (77.76, 7.42), (74.92, 7.61),
]  # fmt: skip


def slime() -> list[Bill]:
    return [hosted(RATES, 64, sequence - response, response, sequence) for response, sequence, _ in SLIME]


def prime() -> list[Bill]:
    return [hosted(RATES, 512, prompt, response, sequence) for prompt, response, sequence, _ in PRIME]


def averages(bills: list[Bill]) -> list[float]:
    """As the comparison prints them: means over all steps, and of the steps' ratios."""
    rows = [(bill.prefill_usd, bill.sample_usd, bill.train_usd, bill.usd, bill.usd_per_mtok) for bill in bills]
    return [mean(column) for column in zip(*rows, strict=True)]


def test_capital_running_costs_and_the_gpu_hour() -> None:
    server = Server(OwnershipSettings())
    assert server.capital_usd_per_month == pytest.approx(6738.18, abs=0.005)
    assert server.electricity_usd_per_kw_month == pytest.approx(68.59, abs=0.005)
    assert server.power_usd_per_month == pytest.approx(2388.27, abs=0.2)  # printed from unrounded kilowatts
    assert server.running_usd_per_month == pytest.approx(2558.27, abs=0.2)
    hour = server.gpu_hour
    assert (round(hour.capital_usd, 2), round(hour.running_usd, 2), round(hour.usd, 2)) == (1.15, 0.44, 1.59)
    assert hour.capital_usd / hour.usd == pytest.approx(0.7248, abs=0.0005)


def test_the_hour_of_a_pool() -> None:
    assert pool_usd(GPU_HOUR, 96, 3600) == pytest.approx(152.64)
    assert pool_usd(GPU_HOUR, 256, 3600) == pytest.approx(407.04)


def test_each_hosted_step() -> None:
    for bill, printed in zip(slime(), SLIME_PRINTED, strict=True):
        assert bill.usd_per_mtok == pytest.approx(printed, abs=0.0051)


def test_a_price_per_mtok_does_not_depend_on_the_batch() -> None:
    x = 11128 / 19702
    assert slime()[0].usd_per_mtok == pytest.approx(0.68 * (1 - x) + 1.70 * x + 2.04)


def test_hosted_averages() -> None:
    assert averages(slime()) == pytest.approx([0.35, 1.33, 2.63, 4.31, 3.34], abs=0.0051)
    assert averages(prime()) == pytest.approx([1.95, 11.06, 19.11, 32.11, 3.43], abs=0.0051)


def test_owned_steps() -> None:
    for (*_, sequence, seconds), (usd, per_mtok) in zip(PRIME, PRIME_OWN, strict=True):
        cost = pool_usd(GPU_HOUR, 256, seconds)
        assert cost == pytest.approx(usd, abs=0.051)  # their seconds are rounded
        assert usd_per_mtok(cost, 512 * sequence) == pytest.approx(per_mtok, abs=0.011)


def owned_per_mtok() -> tuple[float, float]:
    small = mean(usd_per_mtok(pool_usd(GPU_HOUR, 96, s), 64 * sequence) for _, sequence, s in SLIME)
    return small, mean(usd_per_mtok(pool_usd(GPU_HOUR, 256, s), 512 * sequence) for *_, sequence, s in PRIME)


def test_owned_averages_and_ratios() -> None:
    small, large = owned_per_mtok()
    assert (small, large) == pytest.approx((16.23, 6.90), abs=0.0051)
    assert mean(pool_usd(GPU_HOUR, 256, s) for *_, s in PRIME) == pytest.approx(65.09, abs=0.0051)
    assert small / averages(slime())[-1] == pytest.approx(4.86, abs=0.0051)
    assert large / averages(prime())[-1] == pytest.approx(2.01, abs=0.0051)


def test_break_even_and_what_was_reached() -> None:
    for bills, even in ((slime(), 132), (prime(), 129)):
        assert break_even_tokens_per_s(GPU_HOUR, averages(bills)[-1]) == pytest.approx(even, abs=0.5)
    assert mean(64 * sequence / s / 96 for _, sequence, s in SLIME) == pytest.approx(27.7, abs=0.05)
    assert mean(512 * sequence / s / 256 for *_, sequence, s in PRIME) == pytest.approx(64.4, abs=0.05)


def test_when_discarded_rollouts_are_paid_for_too() -> None:
    tokens = mean(bill.tokens for bill in prime())
    for acceptance, price, ratio in ((1.0, 3.43, 2.01), (0.4, 5.51, 1.25)):
        whole = usd_per_mtok(mean(bill.sampled_for(acceptance).usd for bill in prime()), tokens)
        assert whole == pytest.approx(price, abs=0.0051)
        assert owned_per_mtok()[1] / whole == pytest.approx(ratio, abs=0.0051)


def test_a_server_without_interest_is_paid_back_in_equal_parts() -> None:
    owned = OwnershipSettings(server_usd=7200, interest_per_year=0, months=72)
    assert Server(owned).capital_usd_per_month == 100


def test_costs_are_divided_by_use() -> None:
    assert divide(10.0, {"a": 3.0, "b": 1.0}) == {"a": 7.5, "b": 2.5}
    assert divide(10.0, {"a": 0.0}) == {"a": 0.0}
