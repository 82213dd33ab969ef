"""Between text and tokens of a base model, with its own files: its tokenizer and its chat template, which is rendered
as transformers renders it (held to that by tests/api/openai). Nothing here needs transformers or torch."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from weft.wire.account.usage import CHAT_TEMPLATES

from api.errors import quote
from api.routes.openai.errors import Refused
from api.state.threads import Threads

#: Characters of a long text that are made into tokens together, to find whether it can fit at all.
PIECE = 1 << 16
#: Tokens of a prompt that its completion is read behind.
CONTEXT = 8
#: What OpenAI's API knows.
ROLES = ("assistant", "developer", "function", "system", "tool", "user")
#: What a message may say beside its content.
SAID = ("audio", "function_call", "refusal", "tool_calls")
#: Where a template tells who of several users says something.
_NAMED = re.compile(r"\b(?:message|msg|m)(?:\.name\b|\[['\"]name['\"]\]|\.get\(['\"]name['\"])")
#: What a template raises of values that it does not expect.
_FAILS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
_HALF = re.compile("[\ud800-\udfff]")
#: Stands for an answer while a template is asked what it puts behind one.
_ANSWER = "-an-answer-"
#: A byte as tokenizers with a fallback to bytes spell it.
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
#: The signs that byte-level tokenizers have for bytes: what can be seen stands for itself, the rest follows from 256 on
#: (GPT-2).
_SEEN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTES = {chr(byte): byte for byte in _SEEN} | {
    chr(256 + place): byte for place, byte in enumerate(sorted(set(range(256)) - set(_SEEN)))
}
#: What a template compares a role with, and words of it in quotes.
_COMPARED, _QUOTED = re.compile(r"role\W{0,4}(?:==|!=|in\b)([^%}]*)"), re.compile(r"['\"](\w+)['\"]")


class ChatTemplate:
    """A chat template by its source; "" for a model without one. `own` are the roles that it names."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.own = {role for words in _COMPARED.findall(source) for role in _QUOTED.findall(words)}
        self.roles = sorted({*ROLES, *self.own})
        self._render = _environment().from_string(source).render

    def write(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> str:
        """What it makes of them. Raises Refused: of the options where it does without them."""
        try:
            text = self._render({"add_generation_prompt": True, **options, **given})
        except _FAILS as error:
            field, instead = "messages", "send content as text, and calls of tools as OpenAI has them"
            if options:
                with suppress(Refused):
                    self.write(given, {})
                    field, instead = "chat_template_kwargs", "leave out what it has no use for"
            if type(error) is TemplateError:  # its own words
                raise Refused(f"{field}: the chat template of this model refuses them: {error}", field) from None
            raise Refused(f"{field}: the chat template of this model expects other values; {instead}", field) from None
        if _HALF.search(text):  # as JSON in JSON may spell it
            what = "half of a character has no tokens (surrogates not allowed); send whole ones"
            raise Refused(f"messages: {what}", "messages")
        return text


class ModelText:
    """`tool_template` is the chat template where tools are shown; some models have one of its own for that. `context`:
    how many tokens the model can read. `ends`: what ends an answer as the template writes it or, where it leaves
    answers open (GLM's), the marks of who speaks next, a user or a tool; nothing where that is no special token."""

    def __init__(self, folder: Path, context: int) -> None:
        self._context = context
        self._words: dict[int, str] = {}  # at most the vocabulary
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise Refused(f"model: {folder.name} has no tokenizer.json, which text needs here; send tokens", "model")
        self._tokenizer = Tokenizer.from_file(str(file))
        config = _read(folder / "tokenizer_config.json")
        self._special = {name: _content(value) for name, value in config.items() if name.endswith("_token") and value}
        found = _templates(folder, config)
        self._template = ChatTemplate(found.get("default", ""))
        self.tool_template = ChatTemplate(found["tool_use"]) if found.get("tool_use") else self._template
        self.ends = self._ends()

    def _ends(self) -> list[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token for token, each in added.items() if each.special}
        if own := [token for token in self._behind_an_answer() if token in special]:
            return own[:1]
        marks = [*self._behind_an_answer("user")[:1], *self._behind_an_answer("tool")[:1]]
        return [token for token in marks if token in special]

    def _behind_an_answer(self, *following: str) -> list[int]:
        """What the template puts behind an answer that nobody, or who has that role, speaks after."""
        asked, answered = {"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}
        messages = [asked, answered, *({"role": role, "content": "?"} for role in following)]
        try:
            whole = self.render(messages, options={"add_generation_prompt": False})
        except Refused:
            return []
        return self._tokens(self.decode(whole, special=True).partition(_ANSWER)[2])

    def encode(self, text: str, *, special: bool = True, field: str = "prompt") -> list[int]:
        """With `special`, what the tokenizer adds by itself (a beginning-of-sequence token). Raises Refused, of the
        `field` that the text comes of, if it has more than twice the context: while they are made, tokens take a few
        hundred bytes each."""
        if len(text) > 2 * self._context:
            pieces = (text[start : start + PIECE] for start in range(0, len(text), PIECE))
            if any(tokens > 2 * self._context for tokens in accumulate(len(self._tokens(each)) for each in pieces)):
                raise Refused(
                    f"This model's maximum context length is {self._context} tokens, and this text has more than twice "
                    "as many: shorten it",
                    field,
                    "context_length_exceeded",
                )
        return self._tokens(text, special)

    def _tokens(self, text: str, special: bool = False) -> list[int]:
        # Of the ways to ask for them, the one that lets other threads go on meanwhile.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of tokens; special tokens are spelled out with `special`."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=not special)

    def context_of(self, prompt: Sequence[int], *, special: bool = False) -> tuple[int, ...]:
        """What a completion of `prompt` is read behind: some tokenizers leave out the space before a word that nothing
        is before. Nothing where the prompt ends within a character."""
        last = tuple(prompt[-CONTEXT:])
        return () if self.decode(last, special=special).endswith("\ufffd") else last

    def word(self, token: int) -> str:
        """One token as text within others, spelled out: some decoders leave out a space before the first."""
        if token not in self._words:
            first = self.decode([token], special=True)
            self._words[token] = first if "\ufffd" in first else self.decode([token] * 2, special=True)[len(first) :]
        return self._words[token]

    def bytes_of(self, token: int) -> bytes:
        """The bytes of one token, which may be part of a character and no text by itself."""
        word = self.word(token)
        if "\ufffd" in word:
            piece = self._tokenizer.id_to_token(token) or ""
            if _BYTE.fullmatch(piece):
                return bytes([int(piece[3:5], 16)])
            if all(sign in _BYTES for sign in piece):
                return bytes(_BYTES[sign] for sign in piece)
        return word.encode()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        field: str = "messages",
    ) -> list[int]:
        """The tokens of a conversation; `options` are for the template (`enable_thinking`, ...). Raises Refused for
        what the template cannot say, or what is too long: then of the `field` that the conversation comes in."""
        template = self.tool_template if tools else self._template
        if not template.source:
            raise Refused("messages: this model has no chat template; use /v1/completions", "messages")
        if tools and "tools" not in template.source:
            raise Refused("tools: the chat template of this model has no place for them", "tools")
        said = [_plain(message, f"messages[{place}]", template) for place, message in enumerate(messages)]
        _tell_apart(said, template)
        given = {"messages": said, "tools": tools, "documents": None, **self._special}
        for name in options or ():
            if name in given or name == "self":
                where = f"chat_template_kwargs.{name}"
                raise Refused(f"{where}: a template is given this by the server; leave it out", where)
        text = template.write(given, options or {})
        for place, message in enumerate(said):
            role, content = message["role"], message["content"].strip()
            if role not in {"assistant", "user", *template.own} and content not in text:
                what = f"the chat template of this model leaves out what role {quote(role)} says"
                raise Refused(f"messages[{place}].role: {what}", f"messages[{place}].role", "unsupported_value")
        return self.encode(text, special=False, field=field)


@functools.lru_cache(maxsize=32)
def text_of(folder: Path, context: int) -> ModelText:
    return ModelText(folder, context)


T = TypeVar("T")
#: Texts of one organisation that are made into tokens at a time; further ones wait, and take no thread from others.
AT_ONCE = 2
_threads = Threads(AT_ONCE)


async def in_turn(org_id: str, work: Callable[[], T]) -> T:
    """What reads texts of an organisation, in a thread."""
    return await _threads.run(org_id, work)


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.is_file() else {}


def _content(value: Any) -> Any:
    return value.get("content") if isinstance(value, dict) else value


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name, "default" the one that a model with one alone has; files go before what the config says."""
    more = (folder / CHAT_TEMPLATES).glob("*.jinja")
    files = {file.stem: file.read_text() for file in more}
    if (file := folder / "chat_template.jinja").is_file():
        files["default"] = file.read_text()
    said = config.get("chat_template") or ""
    return files or ({one["name"]: one["template"] for one in said} if isinstance(said, list) else {"default": said})


def _tell_apart(messages: Sequence[Mapping[str, Any]], template: ChatTemplate) -> None:
    """Raises Refused for users of several names, which the template does not tell: to the model they are one."""
    users = ((place, each.get("name")) for place, each in enumerate(messages) if each["role"] == "user")
    named = {name: f"messages[{place}].name" for place, name in users if isinstance(name, str)}
    if len(named) > 1 and not _NAMED.search(template.source):
        where = list(named.values())[-1]
        what = "the chat template of this model does not tell users apart; begin what each says with its name"
        raise Refused(f"{where}: {what}", where, "unsupported_content")


def _plain(message: Mapping[str, Any], where: str, template: ChatTemplate) -> dict[str, Any]:
    """A message as templates expect it: text in one piece, and a tool call's arguments as an object. A developer's
    is a system's where the template knows no developers."""
    role = message.get("role")
    if role not in template.roles:
        what = "missing" if role is None else f"{quote(role)} is not known"
        raise Refused(f"{where}.role: {what}; it must be one of {', '.join(template.roles)}", f"{where}.role")
    for name in SAID:
        if message.get(name) and name not in template.source:
            what = "the chat template of this model has no place for it; leave it out"
            raise Refused(f"{where}.{name}: {what}", f"{where}.{name}", "unsupported_content")
    plain = {name: value for name, value in message.items() if value is not None}
    if role == "developer" and role not in template.own:
        plain["role"] = "system"
    plain["content"] = _text(message.get("content"), where)
    if plain.get("tool_calls"):
        plain["tool_calls"] = _plain_calls(plain["tool_calls"], f"{where}.tool_calls")
    return plain


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise Refused(
            f"{where}.content: only text can be read here; leave the rest out, or say it in words",
            f"{where}.content",
            "unsupported_content",
        )
    return "".join(str(text) for text in texts)


def _plain_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    plain = []
    for place, call in enumerate(calls if isinstance(calls, list) else [calls]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            here = f"{where}[{place}]"
            raise Refused(f"{here}: must be {{'type': 'function', 'function': {{'name', 'arguments'}}}}", here)
        function = dict(function)
        if isinstance(function.get("arguments"), str):
            with suppress(ValueError, RecursionError):
                function["arguments"] = json.loads(function["arguments"])
        plain.append({**call, "function": function})
    return plain


class _Marked(Extension):
    """`{% generation %}`, by which trainers find what an assistant has said."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    def fail(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=options.pop("ensure_ascii", False), **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Marked]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # as transformers
    return environment
