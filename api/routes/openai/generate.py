"""vLLM's API: generation from tokens to tokens, and a model's tokenizer."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response
from weft.wire.binary.sample_codec import SampleResult

from api.checks.priority import PriorityDep
from api.http.access import declare
from api.http.auth import PrincipalDep
from api.routes.openai.answers import policy_of, prompt_logprobs_of, routed_of, rows_of, usage_of
from api.routes.openai.asking import Asked, ask
from api.routes.openai.bodies import DetokenizeBody, GenerateBody, TokenizeBody, body_of
from api.routes.openai.chat import SAMPLES, params_of
from api.routes.openai.errors import OpenAIRoute, Refused
from api.routes.openai.models import Target, target_of
from api.routes.openai.text import in_turn
from api.routes.openai.tools import check_tools
from api.routes.openai.waiting import answer
from api.state.service import Service, ServiceDep
from api.who.principal import Principal

router = APIRouter(route_class=OpenAIRoute)


@router.post("/inference/v1/generate", **SAMPLES)
async def generate(request: Request, service: ServiceDep, who: PrincipalDep, priority: PriorityDep) -> Response:
    body = await body_of(request, GenerateBody)
    body.refuse_unknown()
    params = body.sampling_params
    target = await target_of(service, who, body.model)
    (asked,) = await ask(
        service,
        who,
        request,
        priority,
        target,
        [body.token_ids],
        params_of(params, params.max_tokens, target),
        params.n or 1,
        told=1 + params.top,
        likeliest="logprobs",
        field="token_ids",
        topk_sample_logprobs=params.top,
        prompt_logprobs=True if params.prompt_logprobs is not None else None,
        topk_prompt_logprobs=params.prompt_logprobs or 0,
        return_routed_experts=body.return_routed_experts or None,
        max_staleness=body.max_staleness,
    )
    return await answer([asked], lambda results: _generated(asked, *results))


def _generated(asked: Asked, result: SampleResult) -> dict[str, Any]:
    choices = []
    for index, sequence in enumerate(result.sequences):
        tokens, logprobs, tops = rows_of(sequence)
        content = [_entry(*cell) for cell in zip(tokens, logprobs, strict=True)]
        for entry, row in zip(content, tops, strict=False):  # empty if no likeliest tokens were asked for
            entry["top_logprobs"] = [_entry(*cell) for cell in row]
        choice: dict[str, Any] = {"index": index, "token_ids": tokens, "finish_reason": sequence.stop_reason}
        choice |= {"logprobs": {"content": content}, "weft": policy_of(sequence)}
        if sequence.routed_experts is not None:
            choice["routed_experts"] = routed_of(sequence, "b64")
        choices.append(choice)
    told: dict[str, Any] = {"request_id": asked.request_id, "choices": choices}
    told |= {"usage": usage_of([asked.prompt], [result]), "prompt_token_ids": asked.prompt}
    if result.prompt_logprobs is not None:
        told["prompt_logprobs"] = prompt_logprobs_of(asked.prompt, result)
    return told


def _entry(token: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token}", "logprob": logprob}


async def _target(service: Service, who: Principal, model: str | None) -> Target:
    return await target_of(service, who, model or next(iter(service.cards)))


@router.post("/tokenize", **declare(scope="sample", limit="call", body="medium"))
@router.post("/v1/tokenize", **declare(scope="sample", limit="call", body="medium"))
async def tokenize(request: Request, service: ServiceDep, who: PrincipalDep) -> Response:
    body = await body_of(request, TokenizeBody)
    body.refuse_unknown()
    if (body.prompt is None) == (body.messages is None):
        raise Refused("prompt, messages: give one of them", "prompt")
    check_tools(body.tools or ())
    target = await _target(service, who, body.model)

    def read() -> list[int]:
        if body.prompt is not None:
            return target.text.encode(body.prompt, special=body.add_special_tokens)
        ending = {"add_generation_prompt": body.add_generation_prompt}
        return target.text.render(body.messages or [], body.tools or None, {**body.chat_template_kwargs, **ending})

    def work() -> bytes:
        tokens = read()
        told: dict[str, Any] = {"count": len(tokens), "max_model_len": target.card.context_length, "tokens": tokens}
        if body.return_token_strs:
            told["token_strs"] = [target.text.word(token) for token in tokens]
        return orjson.dumps(told)

    return Response(await in_turn(who.org_id, work), media_type="application/json")


@router.post("/detokenize", **declare(scope="sample", limit="call", body="medium"))
@router.post("/v1/detokenize", **declare(scope="sample", limit="call", body="medium"))
async def detokenize(request: Request, service: ServiceDep, who: PrincipalDep) -> Response:
    body = await body_of(request, DetokenizeBody)
    body.refuse_unknown()
    target = await _target(service, who, body.model)
    size = target.card.vocab_size
    for place, token in enumerate(body.tokens):
        if token >= size:
            told = f"tokens: token {token} at position {place}; this model's tokens are 0 to {size - 1}"
            raise Refused(told, "tokens")
    text = await in_turn(who.org_id, lambda: target.text.decode(body.tokens, special=True))
    return Response(orjson.dumps({"prompt": text}), media_type="application/json")
