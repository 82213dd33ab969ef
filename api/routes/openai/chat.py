"""Completions and chats, whole and streamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import ValidationError
from weft.wire import SamplingParams

from api.checks.priority import PriorityDep
from api.errors import explain, field_of
from api.http.access import declare
from api.http.auth import PrincipalDep
from api.http.events import EventStream
from api.routes.openai.answers import Form, whole
from api.routes.openai.asking import Asked, ask
from api.routes.openai.bodies import ChatBody, ChatTokensBody, CompletionBody, Drawing, ResponsesBody, Sampling, body_of
from api.routes.openai.chunks import chunks
from api.routes.openai.errors import OpenAIRoute, Refused
from api.routes.openai.models import Target, target_of
from api.routes.openai.text import ModelText, in_turn
from api.routes.openai.waiting import answer
from api.state.service import Service, ServiceDep
from api.who.principal import Principal

router = APIRouter(route_class=OpenAIRoute)

#: `max_tokens` of a completion that names none, as at OpenAI; a chat may fill the context.
COMPLETION_TOKENS = 16
SAMPLES: dict[str, Any] = declare(scope="sample", limit="work", meters="sample", body="data")


@router.post("/v1/chat/completions", **SAMPLES)
async def chat_completions(request: Request, service: ServiceDep, who: PrincipalDep, priority: PriorityDep) -> Response:
    body = await body_of(request, ChatBody)
    body.refuse_unknown()
    target = await target_of(service, who, body.model)
    prompt = await in_turn(
        who.org_id, lambda: target.text.render(body.messages, body.shown_tools, body.chat_template_kwargs)
    )
    return await _chat(request, service, who, priority, body, target, prompt)


@router.post("/v1/chat/completions/tokens", **SAMPLES)
async def chat_tokens(request: Request, service: ServiceDep, who: PrincipalDep, priority: PriorityDep) -> Response:
    """A chat whose prompt is given in tokens, rendered by the client."""
    body = await body_of(request, ChatTokensBody)
    body.refuse_unknown()
    target = await target_of(service, who, body.model)
    await in_turn(who.org_id, lambda: target.text)  # the first use reads it from its file
    return await _chat(request, service, who, priority, body, target, body.tokens, field="tokens")


@router.post("/v1/completions", **SAMPLES)
async def completions(request: Request, service: ServiceDep, who: PrincipalDep, priority: PriorityDep) -> Response:
    body = await body_of(request, CompletionBody)
    body.refuse_unknown()
    target = await target_of(service, who, body.model)
    prompts = await in_turn(who.org_id, lambda: prompts_of(body, target.text))
    top = body.logprobs or 0
    spelled = body.skip_special_tokens is False
    form = Form(
        target.text,
        chat=False,
        logprobs=body.logprobs is not None,
        top=top,
        ids=bool(body.return_token_ids),
        stops=stops_of(body),
        spelled=spelled,
        numbered=bool(body.return_tokens_as_token_ids),
    )
    forms = [
        replace(
            form,
            before=target.text.context_of(tokens, special=spelled),
            echo=echo_of(given, target.text, tokens, spelled=spelled) if body.echo else None,
        )
        for given, tokens in zip(body.prompts, prompts, strict=True)
    ]
    most = body.max_tokens if body.max_tokens is not None else COMPLETION_TOKENS
    options = _options(body, form) | {"likeliest": "logprobs", "field": "prompt"}
    if body.echo and form.logprobs:
        options |= {"prompt_logprobs": True, "topk_prompt_logprobs": top}
    asked = await ask(service, who, request, priority, target, prompts, params_of(body, most, target), body.n or 1,
                      **options)  # fmt: skip
    return await answered(asked, forms, body)


def prompts_of(body: CompletionBody, text: ModelText) -> list[Sequence[int]]:
    """The tokens of a completion's prompts. Text gets the tokens that the tokenizer adds, unless the client asks for
    none."""
    special = body.add_special_tokens is not False
    return [text.encode(given, special=special) if isinstance(given, str) else given for given in body.prompts]


def echo_of(given: str | list[int], text: ModelText, tokens: Sequence[int], *, spelled: bool) -> str:
    """A completion's prompt, as text that its answer repeats exactly, so that a client can cut it off."""
    return given if isinstance(given, str) else text.decode(tokens, special=spelled)


async def _chat(
    request: Request,
    service: Service,
    who: Principal,
    priority: str,
    body: ChatBody,
    target: Target,
    prompt: Sequence[int],
    field: str = "messages",
) -> Response:
    form = Form(
        target.text,
        chat=True,
        logprobs=bool(body.logprobs),
        top=body.top_logprobs or 0,
        ids=bool(body.return_token_ids),
        stops=stops_of(body),
        tools=bool(body.shown_tools),
        spelled=body.skip_special_tokens is False,
        numbered=bool(body.return_tokens_as_token_ids),
        one_call=body.parallel_tool_calls is False,
    )
    asked = await ask(service, who, request, priority, target, [prompt], params_of(body, body.most, target),
                      body.n or 1, field=field, **_options(body, form))  # fmt: skip
    return await answered(asked, [form], body)


def stops_of(body: Drawing) -> tuple[str, ...]:
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def params_of(body: Drawing, most: int | None, target: Target) -> SamplingParams:
    """Sampling parameters. Stop strings and tokens are added to the model's own end and, in a chat, to the template's:
    a base model trained to chat ends its answers as its template does, while its own end token ends a text.
    `ignore_eos` keeps the stop tokens."""
    own = target.card.eos_token_ids
    chat = isinstance(body, ChatBody | ResponsesBody)
    ends = [token for token in target.text.ends if token not in own] if chat else []
    stop: Any = list(stops_of(body)) or None
    if stop:
        stop += map(target.text.word, ends)
    elif body.ignore_eos:
        stop = sorted({*(body.stop_token_ids or ())})
    elif body.stop_token_ids or ends:
        stop = sorted({*own, *ends, *(body.stop_token_ids or ())})
    try:
        return SamplingParams(
            max_tokens=most,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=body.top_k or -1,
            seed=body.seed,
            stop=stop,
        )
    except ValidationError as error:  # a number that no tokenizer or generator accepts
        raise Refused(explain(error), field_of(error)) from None


def _options(body: Sampling, form: Form) -> dict[str, Any]:
    return {
        "told": form.told,
        "topk_sample_logprobs": form.top,
        "prompt_logprobs": True if body.prompt_logprobs is not None else None,
        "topk_prompt_logprobs": body.prompt_logprobs or 0,
        "stream": body.stream or None,
        "return_routed_experts": body.return_routed_experts or None,
        "max_staleness": body.max_staleness,
    }


async def answered(asked: Sequence[Asked], forms: Sequence[Form], body: Sampling) -> Response:
    if body.stream:
        events = chunks(asked, forms, body.n or 1, include_usage=body.include_usage, so_far=body.usage_so_far)
        return EventStream(events)
    first, prompts = asked[0], [one.prompt for one in asked]
    return await answer(asked, lambda results: whole(forms, first.request_id, first.target.name, prompts, results))
