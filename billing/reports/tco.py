"""Cost of ownership: the cost of a GPU-hour from capital and running costs, and the resulting cost of a token.

The arithmetic is that of SemiAnalysis' comparison of owned and hosted RL (2026-06): an annuity in arrears for the
servers, power and space by the kilowatt, and cost per Mtok = price of the pool for the time / tokens trained. Figures
are estimates in floating-point dollars; the ledger's integers are elsewhere (`billing.money.ledger`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from store.settings import OwnershipSettings

T = TypeVar("T")

HOURS_PER_MONTH = 730.0


@dataclass(frozen=True)
class Server:
    """The cost of one server, by the settings."""

    owned: OwnershipSettings

    @property
    def capital_usd_per_month(self) -> float:
        return annuity(self.owned.interest_per_year, self.owned.months, self.owned.server_usd)

    @property
    def electricity_usd_per_kw_month(self) -> float:
        return self.owned.usd_per_kwh * self.owned.load * self.owned.pue * HOURS_PER_MONTH

    @property
    def power_usd_per_month(self) -> float:
        """Electricity and space."""
        return (self.electricity_usd_per_kw_month + self.owned.space_usd_per_kw_month) * self.owned.draw_kw

    @property
    def running_usd_per_month(self) -> float:
        return self.power_usd_per_month + self.owned.other_usd_per_month

    @property
    def gpu_hour(self) -> GpuHour:
        hours = self.owned.gpus_per_server * HOURS_PER_MONTH
        return GpuHour(self.capital_usd_per_month / hours, self.running_usd_per_month / hours)


@dataclass(frozen=True)
class GpuHour:
    """The cost of one hour of one GPU in dollars, whether the GPU is used or not."""

    capital_usd: float
    running_usd: float

    @property
    def usd(self) -> float:
        return self.capital_usd + self.running_usd


def annuity(interest_per_year: float, months: int, value_usd: float) -> float:
    """The payment at the end of each month that pays `value_usd` back."""
    rate = interest_per_year / 12
    return value_usd / months if rate == 0 else value_usd * rate / (1 - (1 + rate) ** -months)


def pool_usd(gpu_hour_usd: float, gpus: int, seconds: float) -> float:
    """The cost in dollars of owning `gpus` GPUs for that many seconds."""
    return gpu_hour_usd * gpus * seconds / 3600


def usd_per_mtok(usd: float, tokens: float) -> float:
    return usd / tokens * 1e6 if tokens else 0.0


def break_even_tokens_per_s(gpu_hour_usd: float, price_usd_per_mtok: float) -> float:
    """The tokens per second and GPU above which owning is cheaper than that price."""
    return gpu_hour_usd / 3600 * 1e6 / price_usd_per_mtok


def divide(whole: float, parts: Mapping[T, float]) -> dict[T, float]:
    """`whole` divided in the proportions of `parts`."""
    total = sum(parts.values())
    return {name: whole * part / total if total else 0.0 for name, part in parts.items()}
