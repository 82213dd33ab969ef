"""The price list: integer micro-USD per million tokens, by model and kind, and per GB-month of storage, in versions.

An operation is priced by the version in force when it is accepted, however long it then waits: a price change never
alters accepted work. Money is integer from here to the database, never a float. `most_for_...` bound what an operation
can cost: that is held for it when it is accepted, and it never costs more.
"""

from __future__ import annotations

import tomllib
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, field_validator

Kind = Literal["train", "prefill", "cached_prefill", "sample"]
KINDS: tuple[Kind, ...] = get_args(Kind)
STORAGE = "storage"
TOKENS_PER_RATE = 1_000_000
#: Storage is counted in byte-hours; a month has 720 hours.
BYTE_HOURS_PER_RATE = 720 * 10**9
ANY_MODEL = "*"
_DEFAULT = Path(__file__).with_name("default_prices.toml")

#: With this bound on a rate, an operation of a billion tokens still fits into 64 bits of nano-USD.
_MAX_UUSD_PER_MTOK = 10**12


class PriceError(ValueError):
    """A price list is invalid, or lacks a price; one line for the operator."""


@dataclass(frozen=True)
class Rate:
    """The price of `per_units` in micro-USD, and the version of the list that it is from."""

    version: str
    uusd: int
    per_units: int = TOKENS_PER_RATE

    def amount_nusd(self, quantity: int) -> int:
        return amount_nusd(quantity, self.uusd, self.per_units)


def amount_nusd(quantity: int, rate_uusd: int, per_units: int = TOKENS_PER_RATE) -> int:
    """The price of `quantity` in nano-USD, rounded half up once: quantity * rate_uusd * 1000 / per_units."""
    return (quantity * rate_uusd * 1000 + per_units // 2) // per_units


_UusdPerMtok = Annotated[int, Field(strict=True, ge=0, le=_MAX_UUSD_PER_MTOK)]


class _ModelPrices(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    train: _UusdPerMtok
    prefill: _UusdPerMtok
    cached_prefill: _UusdPerMtok
    sample: _UusdPerMtok


class _Version(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    version: Annotated[str, Field(min_length=1, max_length=64)]
    effective_from: AwareDatetime
    storage_uusd_per_gb_month: _UusdPerMtok = 0
    models: dict[str, _ModelPrices]

    @field_validator("models")
    @classmethod
    def _prices_every_model(cls, models: dict[str, _ModelPrices]) -> dict[str, _ModelPrices]:
        if ANY_MODEL not in models:
            raise ValueError(f'needs prices for "{ANY_MODEL}", so that no model is without')
        return models


class PriceList:
    """All versions, oldest first. Built by `load_prices`."""

    def __init__(self, versions: list[_Version]) -> None:
        self._versions = sorted(versions, key=lambda version: version.effective_from)
        self._starts = [version.effective_from for version in self._versions]
        names = [version.version for version in versions]
        for what, values in (("name", names), ("effective_from", self._starts)):
            if len(set(values)) != len(values):
                raise PriceError(f"prices: two versions have the same {what}")

    @property
    def begins(self) -> datetime:
        """The time at which the first version begins. Operations that were accepted earlier have no price."""
        return self._starts[0]

    def unnamed(self, models: Iterable[str], at: datetime) -> str:
        """A warning for the operator about models without prices of their own; "" if all have them."""
        version = self._versions[max(0, bisect_right(self._starts, at) - 1)]
        found = ", ".join(sorted(set(models) - version.models.keys()))
        return found and f'{found}: no price of its own, so work costs what prices.models."{ANY_MODEL}" says'

    def rate(self, model: str, kind: str, at: datetime) -> Rate:
        """The rate for work accepted at `at` (with its time zone). Raises PriceError if no version was in force
        then."""
        index = bisect_right(self._starts, at)
        if index == 0:
            raise PriceError(
                f"no prices are valid at {at.isoformat()}: the first begin at {self._starts[0].isoformat()}"
            )
        version = self._versions[index - 1]
        if kind == STORAGE:
            return Rate(version.version, version.storage_uusd_per_gb_month, BYTE_HOURS_PER_RATE)
        if kind not in KINDS:
            raise PriceError(f"there is no price for {kind!r}: kinds are {', '.join((*KINDS, STORAGE))}")
        prices = version.models.get(model) or version.models[ANY_MODEL]
        return Rate(version.version, int(getattr(prices, kind)))


def load_prices(tables: list[dict[str, Any]] | None = None, *, now: datetime | None = None) -> PriceList:
    """The price list of an operator's `[[prices]]` tables, or the default one when there are none.

    Raises PriceError if a table is wrong, or no version is valid yet (`now`): work could not be billed."""
    tables = tables or tomllib.loads(_DEFAULT.read_text())["prices"]
    try:
        versions = [_Version.model_validate(table) for table in tables]
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise PriceError(f"prices: {where}: {first['msg']}") from None
    prices = PriceList(versions)
    prices.rate(ANY_MODEL, "train", now or datetime.now(UTC))
    return prices


#: An exact price in nano-USD has this as its denominator: tokens * uusd_per_mtok * 1000 / 1_000_000.
_EXACT = 1000


def most_for_tokens(prices: PriceList, model: str, kind: Kind, tokens: int, at: datetime) -> int:
    """The bound for an operation on data, whose tokens are known: exactly what it costs, in nano-USD."""
    return prices.rate(model, kind, at).amount_nusd(tokens)


def most_for_sample(prices: PriceList, model: str, prompt: int, samples: int, new_tokens: int, at: datetime) -> int:
    """The bound for `samples` sequences from a prompt of `prompt` tokens, with at most `new_tokens` new ones in all.

    The prompt is computed once at most (cached parts are billed at their own rate) and read from the cache for the
    other samples. Each kind is a row of its own, rounded on its own, so there is room for three roundings."""
    prefill, cached, sample = (prices.rate(model, kind, at).uusd for kind in ("prefill", "cached_prefill", "sample"))
    exact = max(prefill, cached) * prompt + cached * (samples - 1) * prompt + sample * new_tokens
    return (exact + 3 * _EXACT // 2) // _EXACT if exact else 0
