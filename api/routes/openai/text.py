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

#: How many characters of a long text are tokenized at a time, to find out whether it can fit.
PIECE = 1 << 16
#: With how many of a prompt's last tokens a completion is decoded, as context.
CONTEXT = 8
#: The roles of OpenAI's API.
ROLES = ("assistant", "developer", "function", "system", "tool", "user")
#: Roles whose messages need no content: calls, and functions that return nothing.
MAY_BE_SILENT = ("assistant", "function")
#: Fields of a message beside its content.
SAID = ("audio", "function_call", "refusal", "tool_calls")
#: Matches templates that tell several users apart by their names.
_NAMED = re.compile(r"\b(?:message|msg|m)(?:\.name\b|\[['\"]name['\"]\]|\.get\(['\"]name['\"])")
#: Errors that a template raises for values that it does not expect.
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
#: Placeholder for an answer, used to find out which text the template puts after one.
_ANSWER = "-an-answer-"
#: A byte as written by tokenizers that fall back to bytes.
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
#: The characters that byte-level tokenizers use for bytes: printable bytes stand for themselves, the others are 256 and
#: up (GPT-2).
_SEEN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTES = {chr(byte): byte for byte in _SEEN} | {
    chr(256 + place): byte for place, byte in enumerate(sorted(set(range(256)) - set(_SEEN)))
}
#: Matches what a template compares a role with, and quoted words in it.
_COMPARED, _QUOTED = re.compile(r"role\W{0,4}(?:==|!=|in\b)([^%}]*)"), re.compile(r"['\"](\w+)['\"]")


class ChatTemplate:
    """A chat template; `source` is "" for a model without one. `own` are the roles that it names."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.own = {role for words in _COMPARED.findall(source) for role in _QUOTED.findall(words)}
        self.roles = sorted({*ROLES, *self.own})
        self._render = _environment().from_string(source).render

    def write(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> str:
        """Render the template. Raises Refused; naming the options if it renders without them."""
        try:
            text = self._render({"add_generation_prompt": True, **options, **given})
        except _FAILS as error:
            field, instead = "messages", "send content as text, and calls of tools as OpenAI has them"
            if options:
                with suppress(Refused):
                    self.write(given, {})
                    field, instead = "chat_template_kwargs", "leave out what it has no use for"
            if type(error) is TemplateError:  # the template's own words
                raise Refused(f"{field}: the chat template of this model refuses them: {error}", field) from None
            raise Refused(f"{field}: the chat template of this model expects other values; {instead}", field) from None
        if _HALF.search(text):  # JSON inside of JSON may spell half of a surrogate pair
            what = "half of a character has no tokens (surrogates not allowed); send whole ones"
            raise Refused(f"messages: {what}", "messages")
        return text


class ModelText:
    """The tokenizer and chat templates of a base model. `tool_template` is the template for conversations with tools,
    which some models have apart. `context`: how many tokens the model can read. `ends`: the special token with which
    the template ends an answer; if it ends none (GLM), the marks of the next speakers, user and tool; else empty."""

    def __init__(self, folder: Path, context: int) -> None:
        self._context = context
        self._words: dict[int, str] = {}  # not more than the vocabulary
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
        """The tokens that the template puts after an answer: at the end, or before a message of the `following`
        role."""
        asked, answered = {"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}
        messages = [asked, answered, *({"role": role, "content": "?"} for role in following)]
        try:
            whole = self.render(messages, options={"add_generation_prompt": False})
        except Refused:
            return []
        return self._tokens(self.decode(whole, special=True).partition(_ANSWER)[2])

    def encode(self, text: str, *, special: bool = True, field: str = "prompt") -> list[int]:
        """The tokens of a text; with `special`, with those that the tokenizer adds (a beginning-of-sequence token).
        Raises Refused, naming `field`, for a text with more than twice the context: each token takes a few hundred
        bytes while it is made."""
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
        # Of the tokenizer's calls, the one that lets other threads run meanwhile.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """The text of tokens; with `special`, special tokens are part of it."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=not special)

    def context_of(self, prompt: Sequence[int], *, special: bool = False) -> tuple[int, ...]:
        """The last tokens of `prompt`, as context for decoding its completion: some tokenizers leave out the space
        before the first word. Empty if the prompt ends inside of a character."""
        last = tuple(prompt[-CONTEXT:])
        return () if self.decode(last, special=special).endswith("\ufffd") else last

    def word(self, token: int) -> str:
        """One token as text in the middle of others, special tokens included: some decoders leave out a space before
        the first."""
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
        """The tokens of a conversation; `options` are for the template (`enable_thinking`, ...). Raises Refused for a
        conversation that the template cannot write, or that is too long (naming `field`)."""
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
#: How many texts of one organisation are tokenized at a time; further ones wait without taking a thread.
AT_ONCE = 2
_threads = Threads(AT_ONCE)


async def in_turn(org_id: str, work: Callable[[], T]) -> T:
    """Do `work` on texts of an organisation in a thread, in its turn."""
    return await _threads.run(org_id, work)


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.is_file() else {}


def _content(value: Any) -> Any:
    return value.get("content") if isinstance(value, dict) else value


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; "default" is that of a model with only one. Files count before the config."""
    more = (folder / CHAT_TEMPLATES).glob("*.jinja")
    files = {file.stem: file.read_text() for file in more}
    if (file := folder / "chat_template.jinja").is_file():
        files["default"] = file.read_text()
    said = config.get("chat_template") or ""
    return files or ({one["name"]: one["template"] for one in said} if isinstance(said, list) else {"default": said})


def _tell_apart(messages: Sequence[Mapping[str, Any]], template: ChatTemplate) -> None:
    """Raise Refused for users of different names if the template does not write names: to the model they would be
    one."""
    users = ((place, each.get("name")) for place, each in enumerate(messages) if each["role"] == "user")
    named = {name: f"messages[{place}].name" for place, name in users if isinstance(name, str)}
    if len(named) > 1 and not _NAMED.search(template.source):
        where = list(named.values())[-1]
        what = "the chat template of this model does not tell users apart; begin what each says with its name"
        raise Refused(f"{where}: {what}", where, "unsupported_content")


def _plain(message: Mapping[str, Any], where: str, template: ChatTemplate) -> dict[str, Any]:
    """A message as templates expect it: text in one piece, and a tool call's arguments as an object. A developer's
    message becomes the system's if the template knows no developers."""
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
    if "content" not in plain and role not in MAY_BE_SILENT:
        what = f"missing; send what role {quote(role)} says as text"
        raise Refused(f"{where}.content: {what}", f"{where}.content")
    plain["content"] = _text(plain.get("content"), where)
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
    """The tag `{% generation %}`, with which trainers mark an assistant's text."""

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
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # as transformers does
    return environment
