"""Messages to token ids and back, by the base model's own chat template.

`Renderer` is the part of the package `renderers` that a chat needs, so one of its renderers can stand in place of ours,
and should for models that it knows: it parses their tool calls and thinking exactly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

_CALL, _CALLED = re.compile(r"<tool_call>\s*(?=\{)"), re.compile(r"\}\s*</tool_call>")
_THOUGHT, _THINK, _END_OF_THOUGHT = re.compile(r"^\s*<think>(.*?)</think>\s*", re.S), "<think>", "</think>"
#: The roles of a conversation that are accepted. Templates leave out messages of other roles without an error.
ROLES = ("system", "developer", "user", "assistant", "tool")
#: Placeholder for an answer, used to find out which text the template puts after one.
_SAMPLED = "\u2402sampled\u2403"
_HEAD: Sequence[Message] = ({"role": "user", "content": "?"}, {"role": "assistant", "content": _SAMPLED})


class Renderer(Protocol):
    """How a model's conversations are written as tokens, and its answers read."""

    def render_ids(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """The whole conversation."""
        ...

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> Any:
        """The next turn's prompt: the tokens that were read and sampled, unchanged, then `new_messages` and the start
        of the next answer; None if the template does not keep what was sampled. A list of ids, or an object with
        `token_ids`."""
        ...

    def parse_response(self, token_ids: list[int], *, tools: list[Any] | None = None) -> Any:
        """`content`, `reasoning_content` and `tool_calls` of what was sampled."""
        ...


@dataclass(frozen=True)
class ToolCall:
    """A tool that the model wants called. `arguments` is None if it wrote no valid JSON object."""

    name: str
    arguments: dict[str, Any] | None


@dataclass(frozen=True)
class Parsed:
    """A sampled answer, read as a message."""

    content: str
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


class TemplateRenderer:
    """Any tokenizer with a chat template. Tool calls are read as Qwen and Hermes write them."""

    def __init__(self, tokenizer: Any, template_options: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self._options = dict(template_options or {})

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool] | None, opened: bool) -> str:
        _check_form(messages)
        given = [_shown(message) for message in messages]
        made = self.tokenizer.apply_chat_template(
            given,
            tools=list(tools) if tools else None,
            add_generation_prompt=opened,
            tokenize=False,
            **self._options,
        )
        self._check_shown(given, tools, str(made))
        return str(made)

    def _check_shown(self, messages: Sequence[Message], tools: Sequence[Tool] | None, made: str) -> None:
        """Raise ValueError if the template left a message, a role or the tools out of `made`: templates do so without
        an error."""
        others = {place: each for place, each in enumerate(messages) if each["role"] not in ("user", "assistant")}
        calls = [place for place, each in enumerate(messages) if each.get("tool_calls")]
        if not (tools or others or calls):
            return
        source, nowhere = self._source(tools), "the chat template of this model has no place for"
        if tools and "tools" not in source:
            raise ValueError(f"tools: {nowhere} them; tell of them in a message, or take a model that has one")
        if calls and "tool_calls" not in source:
            raise ValueError(f"messages[{calls[0]}]: {nowhere} tool_calls; write the call as its content")
        for place, message in others.items():
            if message["role"] not in source and message["content"].strip() not in made:
                raise ValueError(f"messages[{place}]: {nowhere} the role {message['role']!r}; say it as the user")

    def _source(self, tools: Sequence[Tool] | None) -> str:
        """The source of the chat template. A model may have another template for conversations with tools."""
        own = self._options.get("chat_template")
        return str(self.tokenizer.get_chat_template(own, tools=list(tools) if tools else None))

    @cached_property
    def _begins_thought(self) -> bool:
        """True if prompts end inside of a thought, so that an answer contains only the thought's end tag."""
        return self._text([{"role": "user", "content": "?"}], None, True).rstrip().endswith(_THINK)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _behind(self, ids: list[int], text: str, whole: str) -> list[int]:
        """The tokens of `whole` after its beginning `text`, whose tokens are `ids`. `whole` is tokenized in one piece,
        because tokenizers such as Mistral's put a space before the first word of a text. If that changes the tokens of
        `text`, the rest is tokenized alone."""
        found = self._ids(whole)
        return found[len(ids) :] if found[: len(ids)] == ids else self._ids(whole[len(text) :])

    def render_ids(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        return self._ids(self._text(messages, tools, add_generation_prompt))

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> list[int] | None:
        added = self._behind_an_answer(new_messages, tools)
        if added is None:
            return None
        if previous_completion_ids and previous_completion_ids[-1] in (*added[:1], self._last_end):
            added = added[1:]  # the end of the turn was sampled
        return [*previous_prompt_ids, *previous_completion_ids, *added]

    def _behind_an_answer(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> list[int] | None:
        """The tokens that the template puts between any answer and `messages`; None if they depend on the answer."""
        try:
            text = self._text([*_HEAD, *messages], tools, True)
        except Exception:  # a template may refuse a result whose call it is not shown; the whole conversation has it
            return None
        _, found, behind = text.partition(_SAMPLED)
        return self._ids(behind) if found and _SAMPLED not in behind else None

    @cached_property
    def _last_end(self) -> int | None:
        """The special token that the template puts after the last answer of a conversation, if there is one. gpt-oss
        writes another one after earlier answers."""
        behind = self._ids(self._text(_HEAD, None, False).partition(_SAMPLED)[2])
        return next((token for token in behind if token in self.tokenizer.all_special_ids), None)

    def _closing(self, messages: Sequence[Message], index: int, tools: Sequence[Tool] | None) -> list[int]:
        """The token that ends an answer which the template does not end itself: the mark of the next speaker, as in
        GLM's. Empty if that mark is no special token."""
        asked = {"role": "tool" if messages[index].get("tool_calls") else "user", "content": "?"}
        following = messages[index + 1] if index + 1 < len(messages) else asked
        if following["role"] in ("assistant", "system"):  # no model lets these follow an answer
            return []
        mark = (self._behind_an_answer([following], tools) or [])[:1]
        return [token for token in mark if token in self.tokenizer.all_special_ids]

    def get_stop_token_ids(self) -> list[int]:
        """The special tokens with which the template ends an answer and a tool call; empty if it uses none."""
        call = {"type": "function", "function": {"name": "f", "arguments": {}}}
        ends = set[int]()
        for said in ({"content": "!"}, {"content": "!", "tool_calls": [call]}):
            with suppress(Exception):  # fails if the template puts no answer after its prompt, or refuses tool calls
                [(ids, sampled)] = self.example([{"role": "user", "content": "?"}, {"role": "assistant", **said}])
                ends.add(ids[max(place for place, own in enumerate(sampled) if own)])
        return sorted(ends.intersection(self.tokenizer.all_special_ids))

    def parse_response(self, token_ids: list[int], *, tools: list[Any] | None = None) -> Parsed:
        ended = bool(token_ids) and token_ids[-1] in self.tokenizer.all_special_ids
        text = str(self.tokenizer.decode(token_ids[:-1] if ended else token_ids))
        closed = _END_OF_THOUGHT in text
        if (closed or not ended) and not text.lstrip().startswith(_THINK) and self._begins_thought:
            text = _THINK + text
        # the answer was cut off inside of its thought
        if not closed and not ended and text.lstrip().startswith(_THINK):
            text += _END_OF_THOUGHT
        thought = _THOUGHT.match(text)
        rest = text[thought.end() :] if thought else text
        said, written = _apart(rest)
        calls = tuple(map(_tool_call, written))
        return Parsed(said.strip() if calls else rest, thought[1].strip() if thought else None, calls)

    def example(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> list[tuple[list[int], list[bool]]]:
        """A conversation as training examples: ids, and which of them its assistant would have sampled.

        One, or several where the template rewrites what was said before; each answer is in exactly one of them."""
        _check_form(messages)
        examples: list[tuple[list[int], list[bool]]] = []
        ids, sampled, written = list[int](), list[bool](), ""
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._text(messages[:index], tools, True)
            whole = _behind_thought(message, prompt, self._text(messages[: index + 1], tools, False))
            if index and not whole.startswith(prompt):
                whole = _behind_last(messages[index - 1], prompt, whole)
            if not whole.startswith(prompt):
                raise ValueError(f"messages[{index}]: the chat template does not put the answer behind its prompt")
            if ids and not prompt.startswith(written):
                examples.append((ids, sampled))
                ids, sampled, written = [], [], ""
            read = self._behind(ids, written, prompt)
            answer = self._behind(ids + read, prompt, whole)
            written, end = whole, _end_of_turn(answer, self.tokenizer.all_special_ids)
            if not end:
                if closing := self._closing(messages, index, tools):
                    answer, written = answer + closing, whole + str(self.tokenizer.decode(closing))
                end = len(answer)
            ids += read + answer
            sampled += [False] * len(read) + [place < end for place in range(len(answer))]
        return [*examples, (ids, sampled)] if ids else examples


def _behind_thought(message: Message, prompt: str, whole: str) -> str:
    """`whole` with its last answer put directly after `prompt`, if the prompt ends inside of a thought that the
    template would write differently, or drop, once it is answered. The thought is the one in `message`, or empty."""
    before, begun, space = prompt.rpartition(_THINK)
    if whole.startswith(prompt) or not begun or space.strip() or not whole.startswith(before):
        return whole
    answer = whole[len(before) :]
    if answer.lstrip().startswith((_THINK, _END_OF_THOUGHT)):
        return prompt + answer.lstrip().removeprefix(_THINK).lstrip()
    within, closed, _ = text_of(message).partition(_END_OF_THOUGHT)
    thought = message.get("reasoning_content") or (within.rpartition(_THINK)[2] if closed else "")
    return f"{prompt}{thought.strip()}\n{_END_OF_THOUGHT}\n\n{answer}"


def _behind_last(last: Message, prompt: str, whole: str) -> str:
    """`whole` with its last answer put directly after `prompt`, if the template writes the same messages differently
    before and after the answer: Mistral's shows the system message only with the last user message. `whole` unchanged
    if the answer cannot be told apart."""
    text = text_of(last).strip()
    _, found, behind = prompt.rpartition(text) if text else ("", "", "")
    if not found or not behind.strip():
        return whole
    before = prompt.count(text + behind)
    parts = whole.split(text + behind, before)
    return prompt + parts[-1] if len(parts) > before else whole


def _end_of_turn(answer: list[int], special: Sequence[int]) -> int:
    """How many tokens of an answer are sampled: up to its last special token, since the template adds more after it. 0
    if it has no special token: the end of the answer is then not part of it."""
    return max((place + 1 for place, token in enumerate(answer) if token in special), default=0)


def _check_form(messages: Sequence[Message]) -> None:
    for place, message in enumerate(messages):
        if (role := message.get("role")) not in ROLES:
            known = ", ".join(ROLES)
            raise ValueError(f"messages[{place}]: 'role' is {role!r:.40}; it must be one of {known}: rename yours")
        if message.get("content") is None and not (message.get("tool_calls") or message.get("reasoning_content")):
            if "content" in message:
                raise ValueError(f"messages[{place}]: 'content' is None; of an answer that says nothing it is ''")
            raise ValueError(f"messages[{place}] has no 'content', only {', '.join(map(repr, message))}: rename yours")


def _shown(message: Message) -> dict[str, Any]:
    """A message in the form that templates expect: text in one piece, arguments of calls as objects, no field that is
    None."""
    shown = {name: value for name, value in message.items() if value is not None} | {"content": text_of(message)}
    if calls := shown.get("tool_calls"):
        shown["tool_calls"] = [_with_arguments(call) for call in calls]
    return shown


def _with_arguments(call: Any) -> Any:
    """A call, or its `function`, whose arguments are an object instead of the JSON text that OpenAI's API uses."""
    if not isinstance(call, Mapping):
        return call
    if "function" in call:
        return {**call, "function": _with_arguments(call["function"])}
    if isinstance(call.get("arguments"), str):
        with suppress(ValueError, RecursionError):
            return {**call, "arguments": json.loads(call["arguments"])}
    return call


def text_of(message: Message) -> str:
    """The text of a message whose content may be parts, as OpenAI writes it. Raises ValueError if a part is not
    text."""
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return content or ""
    if not isinstance(content, Iterable):
        raise ValueError(f"'content' must be a text or a list of parts, got {content!r:.80}")
    for part in content:
        if part.get("type") != "text":
            raise ValueError(
                f"a {message.get('role')!r} message has a part of type {part.get('type')!r}: only text can be read"
            )
    return "".join(part["text"] for part in content)


def _apart(text: str) -> tuple[str, list[str]]:
    """The text beside tool calls, and the calls. The text is read in one pass: a model may open many calls and close
    none, and all other rollouts wait meanwhile."""
    said, calls, at = list[str](), list[str](), 0
    while (begun := _CALL.search(text, at)) and (ended := _CALLED.search(text, begun.end())):
        said.append(text[at : begun.start()])
        calls.append(text[begun.end() : ended.start() + 1])
        at = ended.end()
    return "".join([*said, text[at:]]), calls


def _tool_call(text: str) -> ToolCall:
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", {})
        json.dumps(arguments, allow_nan=False)  # Python writes NaN as a number, JSON has none
    except (ValueError, KeyError, AttributeError, RecursionError):
        return ToolCall("", None)
    return ToolCall(str(name), arguments if isinstance(arguments, dict) else None)
