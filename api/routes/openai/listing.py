"""The models that can be named, and what was sampled in a session."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query
from fastapi.responses import Response
from sqlalchemy import select
from sqlalchemy.orm import Session
from weft.wire.turns import TurnsResponse

from api.errors import NotFound, quote
from api.http.access import LOOKING, WORKING, declare
from api.http.auth import PrincipalDep
from api.routes.openai.errors import OpenAIRoute
from api.routes.openai.models import target_of
from api.routes.openai.turns import page_of, told, turns_of
from api.state.service import ServiceDep
from api.who.lookup import plain_id
from store import tables
from workers.model.card import ModelCard

router = APIRouter(route_class=OpenAIRoute)
turns_router = APIRouter(prefix="/api/v1")


def _shown(name: str, card: ModelCard) -> dict[str, Any]:
    shown = {"id": name, "object": "model", "created": 0, "owned_by": "weft", "root": card.name}
    return {**shown, "max_model_len": card.context_length}


@router.get("/v1/models", **declare(scope=LOOKING, limit="call"))
async def list_models(service: ServiceDep, who: PrincipalDep) -> Response:
    """The base models; tinker:// paths and run:<id> can be named as well."""
    data = [_shown(name, card) for name, card in service.cards.items()]
    return Response(orjson.dumps({"object": "list", "data": data}), media_type="application/json")


@router.get("/v1/models/{name:path}", **declare(scope="sample", limit="call"))
async def get_model(name: str, service: ServiceDep, who: PrincipalDep) -> Response:
    target = await target_of(service, who, name)
    return Response(orjson.dumps(_shown(name, target.card)), media_type="application/json")


@turns_router.get("/weft/turns/{session:path}", response_model=TurnsResponse, **declare(scope=WORKING, limit="call"))
async def get_turns(
    session: str,
    service: ServiceDep,
    who: PrincipalDep,
    after: Annotated[int, Query(ge=0, le=2**62)] = 0,
    limit: Annotated[int, Query(ge=1, le=256)] = 64,
) -> Response:
    """What was sampled under `X-Session-ID: session`, in order: the turns of at most `limit` requests."""
    row = tables.SessionTurn

    def read(reading: Session) -> list[tables.SessionTurn]:
        found = select(row).where(*turns_of(who, session), row.id > after).order_by(row.id)
        return list(reading.scalars(found.limit(limit)))

    rows = await service.read(read) if plain_id(session) else []
    if not rows and not after:
        raise NotFound(f"no turns of a session {quote(session)}; they are kept for a day")

    page = page_of(rows)
    more = page[-1].id if len(page) < len(rows) or len(rows) == limit else None
    head, tail = orjson.dumps({"session": session})[:-1], orjson.dumps({"next": more})[1:]
    turns = await told(service, who, page)
    return Response(b"".join((head, b',"turns":[', turns, b"],", tail)), media_type="application/json")
