"""Weft's own endpoints, beside Tinker's: limits, prices, statistics and tokenizers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse
from starlette.concurrency import run_in_threadpool
from weft.wire import LimitsResponse, PricesResponse, Stats, TokenizerFilesResponse
from weft.wire.account.usage import CHAT_TEMPLATES

from api.errors import NotFound, quote
from api.http.access import declare
from api.http.auth import PrincipalDep
from api.state.service import Service, ServiceDep
from billing.prices import KINDS, STORAGE
from workers.model.card import ModelCard

router = APIRouter(prefix="/api/v1/weft")

#: The files of a model folder that make up its tokenizer; weights are never given out.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
    "config.json",
)


@router.get("/limits", **declare(scope="any", limit="call"))
async def limits(service: ServiceDep, who: PrincipalDep) -> LimitsResponse:
    """What this server accepts, for checks before anything is spent."""
    return service.limits


@router.get("/prices", **declare(scope="any", limit="call"))
async def prices(service: ServiceDep, who: PrincipalDep, model: str) -> PricesResponse:
    """The rates for operations on `model` accepted now."""
    name, now = _card(service, model).name, datetime.now(UTC)
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


@router.get("/models/{name:path}/tokenizer", **declare(scope="any", limit="call"))
async def tokenizer(name: str, service: ServiceDep, who: PrincipalDep) -> TokenizerFilesResponse:
    """The tokenizer files of a base model that there are, and their SHA-256."""
    return await run_in_threadpool(_listed, _card(service, name).path)


@router.get("/models/{name:path}/tokenizer/{file:path}", **declare(scope="any", limit="call"))
async def tokenizer_file(name: str, file: str, service: ServiceDep, who: PrincipalDep) -> FileResponse:
    folder = _card(service, name).path
    listed = await run_in_threadpool(_listed, folder)
    if file not in listed.files and file not in {f"{CHAT_TEMPLATES}/{each}" for each in listed.templates}:
        raise NotFound(f"no tokenizer file {quote(file)} of model {quote(name)}")
    return FileResponse(folder / file)


def _card(service: Service, name: str) -> ModelCard:
    card = service.cards.get(name)
    if card is None:
        raise NotFound(f"no model {quote(name)}; this server has {', '.join(sorted(service.cards))}")
    return card


@lru_cache(maxsize=64)
def _listed(folder: Path) -> TokenizerFilesResponse:
    """The tokenizer files of a model. Remembered, since model folders do not change while they are served."""
    files, templates = (folder / name for name in TOKENIZER_FILES), (folder / CHAT_TEMPLATES).glob("*.jinja")
    return TokenizerFilesResponse(files=_hashes(files), templates=_hashes(templates))


def _hashes(files: Iterable[Path]) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file()}
