"""Weft's own endpoints, beside Tinker's: limits, prices and statistics."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import APIRouter
from weft.wire import LimitsResponse, PricesResponse, Stats

from api.errors import NotFound, quote
from api.http.access import declare
from api.http.auth import PrincipalDep
from api.state.service import Service, ServiceDep
from billing.prices import KINDS, STORAGE
from workers.model.card import ModelCard

router = APIRouter(prefix="/api/v1/weft")


@router.get("/limits", **declare(scope="any", limit="call"))
async def limits(service: ServiceDep, who: PrincipalDep) -> LimitsResponse:
    """What this server accepts, for checks before anything is spent."""
    return service.limits


@router.get("/prices", **declare(scope="any", limit="call"))
async def prices(service: ServiceDep, who: PrincipalDep, model: str) -> PricesResponse:
    """The rates for operations on `model` accepted now."""
    name, now = card_of(service, model).name, datetime.now(UTC)
    rates = {kind: service.prices.rate(name, kind, now) for kind in KINDS}
    return PricesResponse(
        base_model=name,
        price_version=rates["train"].version,
        rates_uusd_per_mtok={kind: rate.uusd for kind, rate in rates.items()},
        storage_uusd_per_gb_month=service.prices.rate(name, STORAGE, now).uusd,
    )


@router.get("/stats", response_model_exclude_unset=True, **declare(scope="any", limit="call"))
async def stats(service: ServiceDep, who: PrincipalDep) -> Stats:
    """How much the machines do; counts over all organisations, and nothing about any one of them. What went wrong with
    the machines is the operator's (`api.server.prometheus`)."""
    found = {**service.stats(), "queue": await service.journal.queue_lengths()}
    for part in ("trainer", "generator"):
        if part in found:
            found[part] = {name: value for name, value in found[part].items() if name != "lost"}
    return Stats.model_validate(found)


def card_of(service: Service, name: str) -> ModelCard:
    """The base model of this name. Raises NotFound."""
    card = service.cards.get(name)
    if card is None:
        raise NotFound(f"no model {quote(name)}; this server has {', '.join(sorted(service.cards))}")
    return card
