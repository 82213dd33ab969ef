"""Streamed answers: OpenAI's chunks as server-sent events, ending with `[DONE]`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from itertools import groupby
from typing import Any

import orjson
from weft.wire.binary.sample_codec import SampleResult

from api.errors import ApiError, form_of
from api.http.events import event
from api.routes.openai.answers import Form, Json, envelope, logprobs_of, rows_of_part, usage_of
from api.routes.openai.asking import Asked
from api.routes.openai.waiting import parts
from scheduler.links.messages import DrawnTokens

DONE = event(b"[DONE]")


async def chunks(
    asked: Sequence[Asked], forms: Sequence[Form], num_samples: int, *, include_usage: bool, so_far: bool = False
) -> AsyncGenerator[bytes, None]:
    """The chunks of an answer. With `include_usage` the last one has the usage; earlier ones have null or, with
    `so_far`, the usage so far."""
    writer = _Writer(asked, forms, num_samples, include_usage=include_usage, so_far=so_far)
    results = list[SampleResult]()
    try:
        async with parts(asked) as coming:
            for choice in writer.opening():
                yield writer.chunk([choice])
            async for place, part in coming:
                if isinstance(part, DrawnTokens):
                    yield writer.chunk([writer.middle(place, part)])
                    continue
                results.append(part)
                for choice in writer.closing(place, part):
                    yield writer.chunk([choice])
            if include_usage:
                yield writer.chunk([], usage=usage_of([one.prompt for one in asked], results))
    except ApiError as error:
        yield event(orjson.dumps(form_of(error)))
    yield DONE


class _Writer:
    """Writes chunks. Choices are numbered over all prompts: first those of the first prompt, then those of the second,
    and so on."""

    def __init__(
        self, asked: Sequence[Asked], forms: Sequence[Form], num_samples: int, *, include_usage: bool, so_far: bool
    ) -> None:
        self._asked, self._form, self._each = asked, forms[0], num_samples
        self._usage, self._so_far = include_usage, so_far
        self._texts = [form.stream() for form in forms for _ in range(num_samples)]
        self._places = [form.places() for form in forms for _ in range(num_samples)]
        self._read, self._drawn = sum(len(one.prompt) for one in asked), 0

    def chunk(self, choices: list[Json], **more: Any) -> bytes:
        first = self._asked[0]
        answer = envelope(self._form, first.request_id, first.target.name, chunk=True)
        answer["choices"] = choices
        if self._usage:
            read, drawn = self._read, self._drawn
            tokens = {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}
            answer["usage"] = tokens if self._so_far else None
        return event(orjson.dumps(answer | more))

    def opening(self) -> list[Json]:
        if not self._form.chat and not self._form.ids:
            return []
        said = {"role": "assistant", "content": ""} if self._form.chat else ""
        choices = [self._choice(index, said) for index in range(len(self._texts))]
        if self._form.ids:
            for index, choice in enumerate(choices):
                choice["prompt_token_ids"] = self._asked[index // self._each].prompt
        return choices

    def middle(self, place: int, part: DrawnTokens) -> Json:
        form, index = self._form, place * self._each + part.sample
        self._drawn += len(part.tokens)
        choice = self._choice(index, self._text(self._texts[index].push(part.tokens)))
        if form.logprobs:
            choice["logprobs"] = logprobs_of(form, *rows_of_part(part), self._places[index])
        if form.ids:
            choice["token_ids"] = part.tokens
            choice["weft"] = {"policy_versions": [[v, len(list(run))] for v, run in groupby(part.versions)]}
        return choice

    def closing(self, place: int, result: SampleResult) -> list[Json]:
        """The last chunks: text that was kept back, tool calls, and why each choice ended."""
        found = []
        for index, sequence in enumerate(result.sequences, place * self._each):
            rest, reason = self._texts[index].end(), sequence.stop_reason
            delta = self._text(rest)
            if self._form.tools:
                parsed = self._form.parsed(rest)
                if parsed.calls:
                    calls = [{"index": number, **call} for number, call in enumerate(parsed.calls)]
                    delta = {"content": parsed.content or None, "tool_calls": calls}
                    found.append(self._choice(index, delta))
                    delta, reason = {}, "tool_calls"  # type: ignore[assignment]
            ended = {**self._choice(index, delta), "finish_reason": reason}
            if self._form.ids:  # only at its end is it known whether a sequence was stopped for its age
                ended["weft"] = {"policy_versions": [], "stale": sequence.stale}
            found.append(ended)
        return found

    def _text(self, text: str) -> Any:
        return {"content": text} if self._form.chat else text

    def _choice(self, index: int, said: Any) -> Json:
        choice: Json = {"index": index, "finish_reason": None, "logprobs": None}
        return {**choice, "delta": said} if self._form.chat else {**choice, "text": said or ""}
