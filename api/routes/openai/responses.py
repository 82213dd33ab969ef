"""OpenAI's Responses API: text in, text and function calls out, whole and streamed. Responses are not stored, so a
client sends the whole conversation."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response
from weft.wire.binary.sample_codec import SampleResult

from api.checks.priority import PriorityDep
from api.errors import ApiError, form_of, quote
from api.http.auth import PrincipalDep
from api.http.events import EventStream, event
from api.routes.openai.answers import Form, Json, logprobs_of, policy_of, rows_of, rows_of_part
from api.routes.openai.asking import Asked, ask
from api.routes.openai.bodies import LOGPROBS, ResponsesBody, body_of
from api.routes.openai.chat import SAMPLES, params_of, stops_of
from api.routes.openai.detokenizing import whole_text
from api.routes.openai.errors import OpenAIRoute, Refused
from api.routes.openai.models import target_of
from api.routes.openai.text import in_turn
from api.routes.openai.waiting import answer, parts
from api.state.service import ServiceDep
from scheduler.links.messages import DrawnTokens

router = APIRouter(route_class=OpenAIRoute)


@router.post("/v1/responses", **SAMPLES)
async def responses(request: Request, service: ServiceDep, who: PrincipalDep, priority: PriorityDep) -> Response:
    body = await body_of(request, ResponsesBody)
    body.refuse_unknown()
    target = await target_of(service, who, body.model)
    messages, tools = messages_of(body), tools_of(body)
    prompt = await in_turn(who.org_id, lambda: target.text.render(messages, tools, body.chat_template_kwargs, "input"))
    params = params_of(body, body.max_output_tokens, target)
    top = body.top_logprobs or 0
    told = LOGPROBS in (body.include or ())
    ids = bool(body.return_token_ids)
    one_call = body.parallel_tool_calls is False
    form = Form(target.text, True, told, top if told else 0, ids, stops_of(body), bool(tools), one_call=one_call)
    more: dict[str, Any] = {
        "told": form.told,
        "field": "input",
        "topk_sample_logprobs": form.top,
        "stream": body.stream or None,
        "max_staleness": body.max_staleness,
    }
    (asked,) = await ask(service, who, request, priority, target, [prompt], params, **more)
    if body.stream:
        return EventStream(_Stream(asked, form, body).events())
    return await answer([asked], lambda results: _whole(asked, form, body, *results))


def messages_of(body: ResponsesBody) -> list[Json]:
    """The conversation in the form of chat templates. Raises Refused for items that are neither text nor calls."""
    messages: list[Json] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    for place, item in enumerate(items):
        kind = item.get("type") or "message"
        if kind == "message" and item.get("role") in ("user", "assistant", "system", "developer"):
            messages.append({"role": item["role"], "content": _text(item.get("content"), place)})
        elif kind == "function_call" and isinstance(item.get("name"), str):
            function = {"name": item["name"], "arguments": item.get("arguments") or "{}"}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            said = {"role": "tool", "tool_call_id": item.get("call_id")}
            messages.append({**said, "content": _text(item.get("output"), place)})
        else:
            what = f"type {quote(str(kind))}" if kind != "message" else f"role {quote(str(item.get('role')))}"
            raise Refused(f"input[{place}]: {what} cannot be read here; leave it out", "input", "unsupported_content")
    return messages


def _text(content: Any, place: int) -> str:
    if isinstance(content, str):
        return content
    pieces = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in pieces]
    kinds = [part.get("type") for part in pieces if isinstance(part, Mapping)]
    readable = all(kind in ("input_text", "output_text", "text") for kind in kinds)
    if not readable or not all(isinstance(text, str) for text in texts):
        raise Refused(
            f"input[{place}]: only text can be read here; leave the rest out, or say it in words",
            "input",
            "unsupported_content",
        )
    return "".join(str(text) for text in texts)


def tools_of(body: ResponsesBody) -> list[Json] | None:
    """Functions in the form that chats use."""
    if body.chosen_tools == "none" or not body.tools:
        return None
    kept = ("name", "description", "parameters")
    return [{"type": "function", "function": {k: tool[k] for k in kept if k in tool}} for tool in body.tools]


def _envelope(asked: Asked, body: ResponsesBody, status: str) -> Json:
    return {
        "id": f"resp_{asked.request_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": asked.target.name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": asked.params.temperature,
        "top_p": asked.params.top_p,
        "text": {"format": {"type": "text"}},
        "tool_choice": body.chosen_tools,
        "tools": body.tools or [],
        "truncation": "disabled",
        "metadata": {},
        "usage": None,
    }


def _ended(asked: Asked, form: Form, body: ResponsesBody, result: SampleResult, output: list[Json]) -> Json:
    (sequence,) = result.sequences
    cut = sequence.stop_reason == "length"
    ended = _envelope(asked, body, "incomplete" if cut else "completed") | {"output": output}
    if cut:
        ended["incomplete_details"] = {"reason": "max_output_tokens"}
    read, drawn = len(asked.prompt), sequence.tokens.size
    ended["usage"] = {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": result.prompt_cache_hit_tokens, "cache_write_tokens": 0},
        "output_tokens": drawn,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + drawn,
    }
    if form.ids:
        ids = {"prompt_token_ids": asked.prompt, "token_ids": sequence.tokens.tolist()}
        ended |= {**ids, "weft": policy_of(sequence)}
    return ended


def _whole(asked: Asked, form: Form, body: ResponsesBody, result: SampleResult) -> Json:
    (sequence,) = result.sequences
    text = whole_text(form.decode, sequence.tokens.tolist(), form.stops)
    parsed = form.parsed(text)
    logprobs = logprobs_of(form, *rows_of(sequence))["content"] if form.logprobs else []
    output = [_message(asked, parsed.content, logprobs)] if parsed.content or not parsed.calls else []
    output += [_call(asked, number, call) for number, call in enumerate(parsed.calls)]
    return _ended(asked, form, body, result, output)


def _part(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _message(asked: Asked, text: str, logprobs: list[Json], status: str = "completed") -> Json:
    content = [_part(text, logprobs)] if status == "completed" else []
    message = {"id": f"msg_{asked.request_id}", "type": "message", "role": "assistant"}
    return {**message, "status": status, "content": content}


def _call(asked: Asked, number: int, call: Json) -> Json:
    made = {"id": f"fc_{asked.request_id}_{number}", "type": "function_call", "status": "completed"}
    return {**made, "call_id": call["id"], **call["function"]}


class _Stream:
    """A response being drawn, as the named events of the Responses API."""

    def __init__(self, asked: Asked, form: Form, body: ResponsesBody) -> None:
        self._asked, self._form, self._body = asked, form, body
        self._text, self._said, self._logprobs = form.stream(), "", list[Json]()
        self._number = self._told = 0  # number of events, and of the log-probabilities told in events so far
        self._opened = False

    def _event(self, kind: str, **more: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **more}
        self._number += 1
        return event(orjson.dumps(data), kind)

    async def events(self) -> AsyncGenerator[bytes, None]:
        begun = _envelope(self._asked, self._body, "in_progress")
        try:
            async with parts([self._asked]) as coming:
                yield self._event("response.created", response=begun)
                yield self._event("response.in_progress", response=begun)
                async for _, part in coming:
                    if isinstance(part, DrawnTokens):
                        if self._form.logprobs:
                            self._logprobs += logprobs_of(self._form, *rows_of_part(part))["content"]
                        for made in self._more(self._text.push(part.tokens)):
                            yield made
                        continue
                    for made in self._end(part):
                        yield made
        except ApiError as error:
            told = form_of(error)["error"]
            yield self._event("error", code=told["code"], message=told["message"], param=told["param"])

    def _more(self, text: str) -> list[bytes]:
        if not text:
            return []
        self._said += text
        place = {"item_id": f"msg_{self._asked.request_id}", "output_index": 0, "content_index": 0}
        fresh, self._told = self._logprobs[self._told :], len(self._logprobs)
        return [*self._open(), self._event("response.output_text.delta", **place, delta=text, logprobs=fresh)]

    def _open(self) -> list[bytes]:
        if self._opened:
            return []
        self._opened = True
        item = _message(self._asked, "", [], "in_progress")
        place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
        added = self._event("response.output_item.added", output_index=0, item=item)
        return [added, self._event("response.content_part.added", **place, part=_part("", []))]

    def _end(self, result: SampleResult) -> list[bytes]:
        rest = self._text.end()
        parsed = self._form.parsed(rest)
        made = self._more(parsed.content)
        if not parsed.calls:
            made += self._open()
        output: list[Json] = []
        if self._opened:
            output.append(_message(self._asked, self._said, self._logprobs))
            place = {"item_id": output[0]["id"], "output_index": 0, "content_index": 0}
            made += [
                self._event("response.output_text.done", **place, text=self._said, logprobs=self._logprobs),
                self._event("response.content_part.done", **place, part=output[0]["content"][0]),
                self._event("response.output_item.done", output_index=0, item=output[0]),
            ]
        for number, call in enumerate(parsed.calls):
            item, index = _call(self._asked, number, call), len(output)
            output.append(item)
            place = {"item_id": item["id"], "output_index": index}
            started = {**item, "status": "in_progress", "arguments": ""}
            made += [
                self._event("response.output_item.added", output_index=index, item=started),
                self._event("response.function_call_arguments.delta", **place, delta=item["arguments"]),
                self._event(
                    "response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"]
                ),
                self._event("response.output_item.done", output_index=index, item=item),
            ]
        whole = _ended(self._asked, self._form, self._body, result, output)
        return [*made, self._event(f"response.{whole['status']}", response=whole)]
