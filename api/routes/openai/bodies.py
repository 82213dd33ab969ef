"""What clients of OpenAI's and vLLM's APIs may ask for. An unknown field, or a value that cannot be honoured, is
refused by name: nothing is silently ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, TypeVar

from fastapi import Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError
from weft.wire.base import Count, Finite, Integer, Positive, Seed
from weft.wire.inputs import Token

from api.errors import quote
from api.http.bodies import read_json
from api.routes.openai.errors import Refused
from api.routes.openai.tools import check_tools
from api.state.service import service_of

B = TypeVar("B", bound=BaseModel)

#: Fields that are accepted only with these values, which change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "response_format": ({"type": "text"},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "tool_choice": ("auto", "none"),
    "modalities": (["text"],),
    "include_stop_str_in_output": (False,),
    "add_special_tokens": (False,),
    "min_tokens": (0,),
    "add_generation_prompt": (True,),
}
#: Fields that tell the sampler nothing: accepted and not used.
UNUSED = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("cache_salt", "priority", "spaces_between_special_tokens", "include_reasoning", "request_id"),
}


_FREE = "nothing constrains what a model draws;"
#: Advice for fields that cannot be honoured; others are to be left out.
ADVICE = {
    "tool_choice": f'{_FREE} send "auto", and expect answers without a call',
    "response_format": f"{_FREE} ask for the format in a message, and check what comes",
    "text.format": f"{_FREE} ask for the format in a message, and check what comes",
}


#: What `include` may ask for in the Responses API.
LOGPROBS = "message.output_text.logprobs"


def form(words: str) -> WrapValidator:
    """A validator for a value that may have several forms: its error names the allowed forms, instead of all reasons
    why each form does not fit."""

    def check(value: Any, inner: Callable[[Any], Any]) -> Any:
        try:
            return inner(value)
        except ValidationError:
            raise PydanticCustomError("form", words) from None

    return WrapValidator(check)


#: Strict: neither true nor "5" is a token.
Tokens = Annotated[list[Annotated[Token, Field(strict=True)]], Field(fail_fast=True)]
#: A list whose first wrong element ends its validation: two million errors would take hundreds of bytes each.
Strings = Annotated[list[str], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


#: How many elements the lists in a body, apart from its prompt, may have.
MOST_OTHERS = 65_536
#: How many entries of `stop` are looked at; the server's own limit is checked later. Counted for both forms at once:
#: every form that does not fit would keep a copy.
Stops = Annotated[
    str | Strings, Field(max_length=4096), form("must be a text, or a list of texts with at most 4096 items")
]
StopTokens = Annotated[Tokens, Field(max_length=4096)]


def _is_one_of(value: Any, known: tuple[Any, ...]) -> bool:
    """True is not 1 here, nor false 0."""
    return any(value == given and (isinstance(given, bool) or not isinstance(value, bool)) for given in known)


def _whether(value: Any) -> Any:
    """A chat's way to ask for log-probabilities, true or false, as a number."""
    return (1 if value else None) if isinstance(value, bool) else value


class StrictBody(BaseModel):
    """A body that refuses unknown fields and values that cannot be honoured."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = NEUTRAL
    unused: ClassVar[set[str]] = UNUSED

    def refuse_unknown(self, within: str = "") -> None:
        for name, value in (self.model_extra or {}).items():
            if value is None or name in self.unused or _is_one_of(value, self.neutral.get(name, ())):
                continue
            known = f"{_shown(value)} cannot be honoured here" if name in self.neutral else "is not supported here"
            name = within + name
            instead = ADVICE.get(name, "leave it out")
            raise Refused(f"{name}: {known}; {instead}", name, "unsupported_parameter")


def _asks(value: int | bool | None) -> bool:
    """True if the value asks for log-probabilities. 0 does, too: for each token's own, without the likeliest tokens."""
    return value is not None and value is not False


def _shown(value: Any) -> str:
    """A short form of a refused value; of an object only its type, since it may be large."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str):
        return f"type {quote(kind)}"
    if isinstance(value, str | int | float):
        return quote(value)
    return "such a list" if isinstance(value, list) else "such an object"


class StreamOptions(StrictBody):
    """`continuous_usage_stats` is vLLM's: with `include_usage` every chunk tells how many tokens were drawn so far."""

    neutral = {"include_obfuscation": (True, False)}
    unused = set()
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Drawing(StrictBody):
    """How tokens are drawn; part of every body that asks for samples. `top_k`, `stop_token_ids` and `ignore_eos` are
    vLLM's."""

    temperature: Annotated[Finite, Field(ge=0)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Integer | None = None
    seed: Seed | None = None
    stop: Stops | None = None
    stop_token_ids: StopTokens | None = None
    ignore_eos: bool | None = None

    def refuse_unknown(self, within: str = "") -> None:
        super().refuse_unknown(within)
        for other in ("stop_token_ids", "ignore_eos"):  # stop strings are added to the model's own end
            if self.stop and getattr(self, other):
                what = f"{within}stop, {other}: only one of them can be honoured"
                raise Refused(what, f"{within}stop", "unsupported_parameter")


class Sampling(Drawing):
    """What completions and chats share. `return_token_ids`, `return_tokens_as_token_ids`, `skip_special_tokens`,
    `prompt_logprobs` and `return_routed_experts` are vLLM's, `max_staleness` is ours (docs/sampling.md)."""

    model: str
    max_tokens: Count | None = None
    n: Positive | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Count | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_routed_experts: bool | None = None
    max_staleness: Count | None = None

    def refuse_unknown(self, within: str = "") -> None:
        super().refuse_unknown(within)
        if self.stream_options is not None:
            if not self.stream:
                raise Refused("stream_options: only with stream: true", "stream_options")
            self.stream_options.refuse_unknown("stream_options.")
        for name in ("prompt_logprobs", "return_routed_experts", "echo"):  # chunks have no place for these
            if self.stream and _asks(getattr(self, name, None)):
                raise Refused(f"{name}: only without stream: true", name, "unsupported_parameter")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def usage_so_far(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class ChatBody(Sampling):
    messages: Annotated[Objects, Field(min_length=1)]
    tools: Objects | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def refuse_unknown(self, within: str = "") -> None:
        super().refuse_unknown(within)
        check_tools(self.tools or ())
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            raise Refused("max_tokens, max_completion_tokens: they differ; give one of them", "max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise Refused("top_logprobs: only with logprobs: true", "top_logprobs")

    @property
    def most(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def shown_tools(self) -> Objects | None:
        return None if (self.model_extra or {}).get("tool_choice") == "none" else self.tools or None


class ChatTokensBody(ChatBody):
    """vLLM's and verifiers' chat over a prompt in tokens: `messages` were rendered by the client."""

    messages: Objects = []
    tokens: Annotated[Tokens, Field(min_length=1)]


class CompletionBody(Sampling):
    neutral = {name: values for name, values in NEUTRAL.items() if name not in ("add_special_tokens", "echo")}
    prompt: Annotated[
        str | Tokens | Annotated[Strings, Field(min_length=1)] | Annotated[list[Tokens], Field(fail_fast=True)],
        form("must be a text, a list of tokens (whole numbers from 0), or a list of one of these"),
    ]
    add_special_tokens: bool | None = None
    logprobs: Annotated[Count | None, BeforeValidator(_whether)] = None
    echo: bool | None = None

    def refuse_unknown(self, within: str = "") -> None:
        super().refuse_unknown(within)
        if self.echo and (self.n or 1) > 1:
            raise Refused("echo: only with n: 1; send one request for each completion", "echo", "unsupported_parameter")
        if self.echo and self.prompt_logprobs is not None:
            raise Refused("echo, prompt_logprobs: only one of them can be honoured", "echo", "unsupported_parameter")
        several = len(self.prompts) > 1 and (self.n or 1) > 1
        for name in ("return_token_ids", "prompt_logprobs"):  # for each prompt, beside its single choice
            if several and _asks(getattr(self, name)):
                what = f"{name}: of several prompts only with n: 1; send one request for each prompt"
                raise Refused(what, name, "unsupported_parameter")

    @property
    def prompts(self) -> list[str | list[int]]:
        listed: Any = self.prompt
        return listed if isinstance(listed, list) and listed and not isinstance(listed[0], int) else [listed]


class Format(StrictBody):
    """The field `text` of the Responses API."""

    neutral = {"format": ({"type": "text"},)}
    unused = set()


class Reasoning(StrictBody):
    """The field `reasoning` of the Responses API. Summaries are not supported."""

    neutral = {"summary": ("auto", "concise", "detailed")}
    unused = set()


class ResponsesBody(Drawing):
    """OpenAI's Responses API, of which nothing is kept: `input` is the whole conversation. `seed`, `stop`,
    `stop_token_ids`, `top_k`, `return_token_ids`, `max_staleness` and `chat_template_kwargs` are as in a chat."""

    neutral = {
        **{"background": (False,), "store": (False,), "truncation": ("disabled",)},
        **{"previous_response_id": (), "conversation": (), "prompt": ()},
        **{"tool_choice": ("auto", "none"), "max_tool_calls": ()},
    }
    unused = UNUSED - {"store"}
    model: str
    input: Annotated[
        str | Annotated[Objects, Field(min_length=1)], form("must be a text, or a list of one or more items (objects)")
    ]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    top_logprobs: Count | None = None
    include: Strings | None = None
    text: dict[str, Any] | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream: bool | None = None
    tools: Objects | None = None
    parallel_tool_calls: bool | None = None
    return_token_ids: bool | None = None
    max_staleness: Count | None = None

    def refuse_unknown(self, within: str = "") -> None:
        for name in ("previous_response_id", "conversation"):
            if (self.model_extra or {}).get(name) is not None:
                said = f"{name}: no response is kept here; send the whole conversation as input"
                raise Refused(said, name, "unsupported_parameter")
        super().refuse_unknown(within)
        check_tools(self.tools or (), "")
        Format.model_validate(self.text or {}).refuse_unknown("text.")
        if self.reasoning is not None:
            self.reasoning.refuse_unknown("reasoning.")
        if self.top_logprobs and LOGPROBS not in (self.include or ()):
            raise Refused(f"top_logprobs: only with include: [{LOGPROBS!r}]", "top_logprobs")
        for name in self.include or ():
            if name not in (LOGPROBS, "reasoning.encrypted_content"):
                raise Refused(f"include: {quote(name)} is not supported here; leave it out", "include")

    @property
    def chosen_tools(self) -> str:
        return str((self.model_extra or {}).get("tool_choice") or "auto")


class GenerateParams(Drawing):
    """vLLM's sampling parameters. `logprobs` above 1 asks for as many likeliest tokens beside each."""

    neutral = {
        **NEUTRAL,
        **{"bad_words": ([],), "extra_args": ({},), "length_penalty": (1,), "use_beam_search": (False,)},
        **{"early_stopping": (False,), "_all_stop_token_ids": ([],)},
    }
    # These say how an engine hands out what it has drawn, and what verifiers adds.
    unused = UNUSED | {
        *("detokenize", "output_kind", "flat_logprobs", "skip_clone", "output_text_buffer_length"),
        *("skip_special_tokens", "return_token_ids", "return_tokens_as_token_ids", "routed_experts_prompt_start"),
        "parallel_tool_calls",
    }
    n: Positive | None = None
    max_tokens: Count | None = None
    logprobs: Count | None = None
    prompt_logprobs: Count | None = None

    @property
    def top(self) -> int:
        return self.logprobs if self.logprobs is not None and self.logprobs > 1 else 0


class GenerateBody(StrictBody):
    neutral = {"stream": (False,), "features": ({},), "kv_transfer_params": ({},), "content_parts": ([],)}
    unused = {"request_id", "cache_salt", "priority", "return_token_ids"}
    model: str
    token_ids: Annotated[Tokens, Field(min_length=1)]
    sampling_params: GenerateParams = GenerateParams()
    return_routed_experts: bool | None = None
    max_staleness: Count | None = None

    def refuse_unknown(self, within: str = "") -> None:
        super().refuse_unknown(within)
        self.sampling_params.refuse_unknown("sampling_params.")


class TokenizeBody(StrictBody):
    neutral = {"continue_final_message": (False,), "chat_template": ("",), "mm_processor_kwargs": ({},)}
    model: str | None = None
    prompt: str | None = None
    messages: Objects | None = None
    tools: Objects | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = True
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] = {}


class DetokenizeBody(StrictBody):
    model: str | None = None
    tokens: Tokens


async def body_of(request: Request, model: type[B]) -> B:
    """The body as a `model`. Raises Malformed, naming the wrong fields, and TooLarge if its lists have more elements
    than the longest prompt plus MOST_OTHERS: the objects made of them take many times their bytes."""
    longest = service_of(request).settings.limits.max_seq_len
    return await read_json(request, model, most_values=longest + MOST_OTHERS)
