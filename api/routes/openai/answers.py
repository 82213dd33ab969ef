"""Results in OpenAI's and vLLM's form."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from orjson import Fragment, dumps
from weft.wire.binary.sample_codec import SampleResult, SequenceResult

from api.routes.openai.detokenizing import Places, TextStream, whole_text
from api.routes.openai.text import ModelText
from api.routes.openai.tools import Parsed, beginning, parse_calls
from scheduler.links.messages import DrawnTokens

Json = dict[str, Any]
#: The digits of base 85, as in RFC 1924.
_DIGITS = np.frombuffer(
    b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~", np.uint8
)


@dataclass(frozen=True)
class Form:
    """How an answer is written. `logprobs`: with log-probabilities, and the `top` likeliest tokens at each position;
    `ids`: with token ids; `spelled`: special tokens are part of the text; `numbered`: logprobs name tokens by id;
    `one_call`: only the first of several tool calls; `before`: tokens that the text continues; `echo`: the prompt, put
    before the text."""

    text: ModelText
    chat: bool
    logprobs: bool = False
    top: int = 0
    ids: bool = False
    stops: tuple[str, ...] = ()
    tools: bool = False
    spelled: bool = False
    numbered: bool = False
    one_call: bool = False
    before: tuple[int, ...] = ()
    echo: str | None = None

    def decode(self, tokens: Sequence[int]) -> str:
        return self.text.decode(tokens, special=self.spelled)

    def word(self, token: int) -> str:
        return f"token_id:{token}" if self.numbered else self.text.word(token)

    def parsed(self, text: str) -> Parsed:
        """The text of an answer apart from its tool calls, and the calls."""
        found = parse_calls(text, self.text.tool_template.source) if self.tools else Parsed(text)
        return Parsed(found.content, found.calls[:1]) if self.one_call else found

    @property
    def told(self) -> int:
        """How many log-probabilities the answer has for each token: its own, and those of the likeliest tokens."""
        return 1 + self.top if self.logprobs else 0

    def stream(self) -> TextStream:
        """A stream of the text of one sequence; a possible tool call is kept back."""
        hold, alone = beginning(self.text.tool_template.source) if self.tools else ("", False)
        return TextStream(self.decode, self.stops, hold, alone=alone, before=self.before)

    def places(self) -> Places:
        """The text offsets of the tokens of one sequence."""
        return Places(self.decode, self.before)


def envelope(form: Form, request_id: str, model: str, *, chunk: bool = False) -> Json:
    kind = ("chat.completion.chunk" if chunk else "chat.completion") if form.chat else "text_completion"
    prefix = "chatcmpl" if form.chat else "cmpl"
    return {"id": f"{prefix}-{request_id}", "object": kind, "created": int(time.time()), "model": model}


def whole(
    forms: Sequence[Form],
    request_id: str,
    model: str,
    prompts: Sequence[list[int]],
    results: Sequence[SampleResult],
) -> Json:
    """The answer in one piece: the choices of the first prompt, then those of the second, and so on. Facts about a
    prompt are fields of the answer if there is only one prompt; else of that prompt's first choice."""
    answer, choices = envelope(forms[0], request_id, model), list[Json]()
    for form, prompt, result in zip(forms, prompts, results, strict=True):
        its = [choice_of(form, index, sequence) for index, sequence in enumerate(result.sequences, len(choices))]
        about = answer if len(prompts) == 1 else its[0]
        if form.ids:
            about["prompt_token_ids"] = prompt
        if form.echo is not None:
            _echo(form, form.echo, its[0], prompt, result)
        elif result.prompt_logprobs is not None:
            about["prompt_logprobs"] = prompt_logprobs_of(prompt, result)
        choices += its
    return answer | {"choices": choices, "usage": usage_of(prompts, results)}


def _echo(form: Form, text: str, choice: Json, prompt: list[int], result: SampleResult) -> None:
    """Put the prompt before the text of a completion, and its log-probabilities (none for the first token) before those
    of the drawn tokens."""
    choice["text"] = text + choice["text"]
    if not form.logprobs:
        return
    assert result.prompt_logprobs is not None
    top = result.topk_prompt_logprobs
    tops = [list(row or []) for row in top.tolist()] if top is not None else []
    # otherwise special tokens were added by the tokenizer, or are not part of the text
    special = form.text.decode(prompt, special=True) == text
    places = Places(partial(form.text.decode, special=special))
    read, drawn = logprobs_of(form, prompt, result.prompt_logprobs.tolist(), tops, places), choice["logprobs"]
    drawn["text_offset"] = [len(text) + place for place in drawn["text_offset"]]
    choice["logprobs"] = {name: read[name] + drawn[name] if drawn[name] is not None else None for name in drawn}
    if form.top:
        choice["logprobs"]["top_logprobs"][0] = None


def choice_of(form: Form, index: int, sequence: SequenceResult) -> Json:
    tokens = sequence.tokens.tolist()
    text = whole_text(form.decode, tokens, form.stops, form.before)
    choice: Json = {"index": index, "finish_reason": sequence.stop_reason, "stop_reason": None}
    choice["logprobs"] = logprobs_of(form, *rows_of(sequence)) if form.logprobs else None
    if not form.chat:
        choice["text"] = text
    else:
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        parsed = form.parsed(text)
        choice["message"] = message
        if parsed.calls:
            message |= {"content": parsed.content or None, "tool_calls": list(parsed.calls)}
            choice["finish_reason"] = "tool_calls"
    if form.ids:
        choice["token_ids"] = tokens
        choice["weft"] = policy_of(sequence)
    if sequence.routed_experts is not None:
        choice["routed_experts"] = routed_of(sequence)
    return choice


def rows_of(sequence: SequenceResult) -> tuple[list[int], list[float], list[list[tuple[int, float]]]]:
    """Tokens, their logprobs, and the likeliest tokens at each position."""
    tops = [list(row or []) for row in sequence.topk.tolist()] if sequence.topk is not None else []
    return sequence.tokens.tolist(), sequence.logprobs.tolist() if sequence.logprobs is not None else [], tops


def rows_of_part(part: DrawnTokens) -> tuple[list[int], list[float], list[list[tuple[int, float]]]]:
    return part.tokens, part.logprobs, [list(zip(*top, strict=True)) for top in part.tops]


def logprobs_of(
    form: Form,
    tokens: list[int],
    logprobs: list[float],
    tops: list[list[tuple[int, float]]],
    places: Places | None = None,
) -> Json:
    """Logprobs in OpenAI's form. Each token's entry is encoded as JSON at once, which takes half the memory. `places`
    gives the text offsets of these tokens; None if they begin their sequence."""
    rows = tops or [[] for _ in tokens]
    if form.chat:
        told = zip(tokens, logprobs, rows, strict=True)
        entries = (
            {**_entry(form, token, logprob), "top_logprobs": [_entry(form, *cell) for cell in row[: form.top]]}
            for token, logprob, row in told
        )
        return {"content": [Fragment(dumps(entry)) for entry in entries], "refusal": None}
    drawn = zip(tokens, logprobs, strict=True)
    best = [Fragment(dumps(_by_word(form, [*row[: form.top], own]))) for row, own in zip(rows, drawn, strict=True)]
    return {
        "tokens": [form.word(token) for token in tokens],
        "token_logprobs": logprobs,
        "top_logprobs": best if form.top else None,
        "text_offset": (places or form.places()).push(tokens),
    }


def _entry(form: Form, token: int, logprob: float) -> Json:
    return {"token": form.word(token), "logprob": logprob, "bytes": list(form.text.bytes_of(token))}


def _by_word(form: Form, row: list[tuple[int, float]]) -> dict[str, float]:
    """Log-probabilities by text, of the likeliest tokens and, last, the drawn one. Of tokens with the same text (parts
    of characters), the first counts."""
    found: dict[str, float] = {}
    for token, logprob in row:
        found.setdefault(form.word(token), logprob)
    return found


def usage_of(prompts: Sequence[Sequence[int]], results: Sequence[SampleResult]) -> Json:
    read = sum(map(len, prompts))
    drawn = sum(sequence.tokens.size for result in results for sequence in result.sequences)
    return {
        "prompt_tokens": read,
        "completion_tokens": drawn,
        "total_tokens": read + drawn,
        "prompt_tokens_details": {"cached_tokens": sum(result.prompt_cache_hit_tokens for result in results)},
    }


def prompt_logprobs_of(prompt: Sequence[int], result: SampleResult) -> list[dict[str, Json] | None]:
    """Prompt logprobs in vLLM's form: for each token its own and the likeliest, as many as were asked for; null for the
    first."""
    assert result.prompt_logprobs is not None
    top = result.topk_prompt_logprobs
    rows = top.tolist() if top is not None else [None] * len(prompt)
    own = zip(prompt, result.prompt_logprobs.tolist(), strict=True)
    return [
        None if cell[1] != cell[1] else {str(token): {"logprob": logprob} for token, logprob in (cell, *(row or ()))}
        for cell, row in zip(own, rows, strict=True)
    ]


def policy_of(sequence: SequenceResult) -> Json:
    spans = [[span.version, span.length] for span in sequence.policy]
    return {"policy_versions": spans, "stale": sequence.stale}


def routed_of(sequence: SequenceResult, encode: str = "b85") -> Json:
    """The experts of every token of prompt + tokens but the last: int32 in base 85, as verifiers 0.1 reads it; or uint8
    (uint16 for more than 256 experts) in base 64, as verifiers 0.4 does."""
    assert sequence.routed_experts is not None
    shape = list(sequence.routed_experts.shape)
    if encode == "b85":
        raw = np.ascontiguousarray(sequence.routed_experts, dtype="<i4").tobytes()
        return {"data": base85(np.frombuffer(raw, ">u4")), "shape": shape}
    dtype = "uint8" if sequence.routed_experts.max(initial=0) < 256 else "uint16"
    raw = np.ascontiguousarray(sequence.routed_experts, dtype=dtype).tobytes()
    return {"data": base64.b64encode(raw).decode(), "shape": shape, "dtype": dtype}


def base85(words: npt.NDArray[np.uint32]) -> str:
    """As `base64.b85encode` over four bytes of each word, which would take ten times as long, and fifty bytes of memory
    for each word."""
    written = np.empty((words.size, 5), np.uint8)
    for place in range(4, -1, -1):
        words, digits = np.divmod(words, 85)
        written[:, place] = _DIGITS[digits]
    return written.tobytes().decode()
