"""The playground: a chat with a base model, a checkpoint or a run, or with two of them side by side.

Each answer is a request to the OpenAI-compatible route, by whoever is signed in: the same checks, limits and prices.
The conversation lives in the page; nothing of it is kept here.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from fastapi import Form, Request
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, TypeAdapter, ValidationError
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from api.console.forms import as_json
from api.console.render import console_router, page
from api.console.security import Viewer, ViewerDep
from api.console.titles import checkpoint_title, run_of_path, run_titles
from api.errors import ApiError, Invalid
from api.http.access import declare
from api.routes.openai.chat import chat_completions
from api.state.rates import count_request
from api.state.service import Service, ServiceDep
from api.who.lookup import live_checkpoints, visible
from scheduler.order.operations import INTERACTIVE
from store.tables import Checkpoint, Run, UsageEvent

router = console_router()

#: How many checkpoints and runs are offered, the newest; any other can be typed.
OFFERED = 50
#: How many of the likeliest tokens are shown beside the drawn one.
TOP = 5
#: The least probability of each shade, the darkest first.
SHADES = (0.02, 0.1, 0.3, 0.7)


class Said(BaseModel):
    role: Literal["user", "assistant"]
    content: str


HISTORY = TypeAdapter(list[Said])


@dataclass(frozen=True)
class Token:
    text: str
    shade: int
    title: str


@dataclass(frozen=True)
class Side:
    """One model's part of a turn: its answer, or what is wrong, and its conversation so far."""

    model: str
    history: list[Said]
    tokens: Sequence[Token] = ()
    problem: str = ""
    finish: str = ""
    drawn: int = 0
    read: int = 0
    cost_nusd: int = 0

    @property
    def kept(self) -> str:
        return HISTORY.dump_json(self.history).decode()


@router.get("/playground", **declare(scope="public", limit="poll"))
async def playground(request: Request, service: ServiceDep, viewer: ViewerDep) -> HTMLResponse:
    viewer.need("sample")

    def read(session: Session) -> dict[str, str]:
        saved = select(Checkpoint).where(visible(viewer.who, Checkpoint), live_checkpoints())
        saved = saved.where(Checkpoint.kind == "sampler_weights").order_by(Checkpoint.created_at.desc())
        runs = select(Run.id).where(visible(viewer.who, Run), Run.state == "live").order_by(Run.created_at.desc())
        kept, live = list(session.scalars(saved.limit(OFFERED))), list(session.scalars(runs.limit(OFFERED)))
        titles = run_titles(session, viewer.org_id, [*(one.run_id for one in kept), *live])
        named = {f"tinker://{one.run_id}/{one.kind}/{one.name}": f"{one.name} of {titles[one.run_id]}" for one in kept}
        return named | {f"run:{run_id}": f"{titles[run_id]}, as it is now" for run_id in live}

    models = {name: "" for name in sorted(service.cards)} | await service.read(read)
    return page(request, "playground.html", viewer, models=models)


@router.post("/playground", **declare(scope="public", limit="work", meters="sample"))
async def say_something(
    request: Request,
    service: ServiceDep,
    viewer: ViewerDep,
    said: Annotated[str, Form(min_length=1)],
    model: Annotated[list[str], Form(min_length=1, max_length=2)],
    history: Annotated[list[str], Form(max_length=2)] = [],  # noqa: B006
    temperature: Annotated[float, Form(ge=0, le=10)] = 1.0,
    max_tokens: Annotated[int, Form(ge=1, le=4096)] = 200,
) -> HTMLResponse:
    """The turn that is added to the page; both sides' conversations, for the next one."""
    viewer.need("sample")
    try:
        before = [HISTORY.validate_json(text) for text in history]
    except ValidationError:
        raise Invalid("history: not a conversation of this page; begin a new one") from None
    options = {"temperature": temperature, "max_completion_tokens": max_tokens}
    named = [(name.strip(), index) for index, name in enumerate(model) if name.strip()]
    asking = [
        _answer(request, service, viewer, name, before[index] if index < len(before) else [], said, options)
        for name, index in named
    ]
    sides = dict(zip((index for _, index in named), await asyncio.gather(*asking), strict=True))
    kept = [sides[index].kept if index in sides else "[]" for index in range(2)]
    models = [side.model for side in sides.values() if not side.problem]
    titles = await service.read(lambda session: _titles(session, viewer.org_id, models))
    values: dict[str, Any] = {"said": said, "sides": list(sides.values()), "kept": kept, "titles": titles}
    return page(request, "playground_turn.html", viewer, **values)


def _titles(session: Session, org_id: str, models: Sequence[str]) -> dict[str, str]:
    """Names of the runs and checkpoints among `models`, of those that have answered."""
    runs = {model: run_of_path(model) or model.removeprefix("run:") for model in models}
    titles = run_titles(session, org_id, runs.values())
    return {
        model: titles[run_id] if model == f"run:{run_id}" else checkpoint_title(model, titles)
        for model, run_id in runs.items()
    }


async def _answer(
    request: Request,
    service: Service,
    viewer: Viewer,
    model: str,
    before: list[Said],
    said: str,
    options: dict[str, Any],
) -> Side:
    history = [*before, Said(role="user", content=said)]
    messages = [one.model_dump() for one in history]
    asked = as_json(request, model=model, messages=messages, logprobs=True, top_logprobs=TOP, **options)
    try:
        await count_request(request, viewer.who)
        reply = orjson.loads((await chat_completions(asked, service, viewer.who, INTERACTIVE)).body)
    except ApiError as error:
        return Side(model, before, problem=error.detail)
    choice, usage = reply["choices"][0], reply["usage"]
    operation_id = reply["id"].partition("-")[2]
    spent = select(func.sum(UsageEvent.amount_nusd)).filter_by(org_id=viewer.org_id, operation_id=operation_id)
    cost = await service.read(lambda session: session.scalar(spent))
    return Side(
        model,
        [*history, Said(role="assistant", content=choice["message"]["content"] or "")],
        [_token(entry) for entry in choice["logprobs"]["content"]],
        finish="" if choice["finish_reason"] == "stop" else choice["finish_reason"],
        drawn=usage["completion_tokens"],
        read=usage["prompt_tokens"],
        cost_nusd=int(cost or 0),
    )


def _token(entry: dict[str, Any]) -> Token:
    """A token with its probability, and those of the likeliest tokens at its position."""
    probability = math.exp(entry["logprob"])
    others = [f"{math.exp(other['logprob']):7.2%}  {other['token']!r}" for other in entry["top_logprobs"]]
    title = "\n".join([f"{entry['token']!r}: {probability:.2%}", *others])
    return Token(entry["token"], sum(probability >= bound for bound in SHADES), title)
