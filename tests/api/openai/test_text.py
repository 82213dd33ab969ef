"""The OpenAI-compatible routes render chat templates, and tokenize, as transformers does with the same files."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from api.routes.openai.answers import Form
from api.routes.openai.bodies import ResponsesBody
from api.routes.openai.detokenizing import PATIENCE, TextStream, whole_text
from api.routes.openai.errors import Refused
from api.routes.openai.responses import messages_of
from api.routes.openai.text import AT_ONCE, PIECE, ModelText, in_turn
from api.routes.openai.tools import Parsed, check_tools, parse_calls
from workers.model.tiny import TINY_PATH

CONTEXT = 2048
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL: Any = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "ü"}}}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is 3 + 5?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "naïve 日本 😀"}],
    [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "<think>\nso\n</think>\n\n2"},
        {"role": "user", "content": "Thanks"},
    ],
]

TOOL_USE = (
    "Call {% for t in tools %}{{ t.function.name }}{% endfor %} by <tool_call>{% for m in messages %}{{ m.content }}"
    "{% if m.tool_calls %}calls{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def text() -> ModelText:
    return ModelText(TINY_PATH, CONTEXT)


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("messages", CHATS)
def test_renders_as_transformers_does(text: ModelText, messages: Any, tools: Any) -> None:
    theirs = AutoTokenizer.from_pretrained(TINY_PATH)
    for more in ({}, {"enable_thinking": False}):
        expected = theirs.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, return_dict=False, **more
        )
        assert text.render(messages, tools, more) == expected
    special = [theirs.convert_tokens_to_ids(word) for word in ("<tool_call>", "</tool_response>", "<think>")]
    assert all(isinstance(token, int) and token >= 1531 for token in special)


@pytest.mark.parametrize("form", ["files", "config"])
def test_a_template_of_its_own_for_tools_is_taken_where_tools_are_shown(form: str, tmp_path: Path) -> None:
    """Hermes 3 has one in its config; transformers writes it to a file."""
    theirs = AutoTokenizer.from_pretrained(TINY_PATH)
    theirs.chat_template = {"default": "{% for m in messages %}{{ m.content }}{% endfor %}", "tool_use": TOOL_USE}
    theirs.save_pretrained(tmp_path, save_jinja_files=form == "files")
    assert (tmp_path / "additional_chat_templates").exists() == (form == "files")
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), ModelText(tmp_path, CONTEXT)
    for tools in (None, TOOLS):
        expected = theirs.apply_chat_template(CHATS[0], tools=tools, add_generation_prompt=True, return_dict=False)
        assert ours.render(CHATS[0], tools) == expected
    said = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert [call["function"]["name"] for call in Form(ours, chat=True, tools=True).parsed(said).calls] == ["add"]


def test_a_template_may_mark_what_is_trained(tmp_path: Path) -> None:
    """As SmolLM3's does, and the templates that TRL has for the models that it trains."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((TINY_PATH / name).read_text())
    marked = (
        "{% set end = 'a' %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}\n"
        "  {% generation %}\n{% set end = 'b' %}{{ m.content }}<|im_end|>\n  {%- endgeneration %}{{ end }}\n"
        "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    )
    (tmp_path / "chat_template.jinja").write_text(marked)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for messages in CHATS:
        said = [{name: value for name, value in each.items() if name != "tool_calls"} for each in messages]
        expected = theirs.apply_chat_template(said, chat_template=marked, return_dict=False)
        assert ModelText(tmp_path, CONTEXT).render(said, options={"add_generation_prompt": False}) == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("refusal", "I won't."),
        ("audio", {"id": "audio-1"}),
        ("function_call", {"name": "add", "arguments": "{}"}),
        ("tool_calls", [CALL]),
    ],
)
def test_what_a_template_has_no_place_for_is_refused(tmp_path: Path, field: str, value: object) -> None:
    """It would be missing from what the model reads, without anybody being told."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((TINY_PATH / name).read_text())
    plain = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(plain)
    asked, answered = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}
    text = ModelText(tmp_path, CONTEXT)
    with pytest.raises(Refused, match=rf"messages\[1\]\.{field}: the chat template of this model has no place for it"):
        text.render([asked, {**answered, field: value}])
    assert text.render([asked, {**answered, field: None}]) == text.render([asked, answered])


def test_users_whom_a_template_does_not_tell_apart_are_refused(text: ModelText, tmp_path: Path) -> None:
    """A single name changes nothing, and frameworks send an assistant's or a tool's name beside the role."""
    asked = [{"role": "user", "name": name, "content": "?"} for name in ("Ann", "Bob")]
    with pytest.raises(Refused, match=r"messages\[1\]\.name: .* does not tell users apart; begin what each says with"):
        text.render(asked)
    plain = {"role": "user", "content": "?"}
    said = {"role": "assistant", "name": "Carl", "content": "!"}
    assert text.render([asked[0], said, asked[0], {**plain, "name": {}}]) == text.render([plain, said, plain, plain])
    (tmp_path / "tokenizer.json").write_text((TINY_PATH / "tokenizer.json").read_text())
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m['name'] }}: {{ m.content }}{% endfor %}")
    telling = ModelText(tmp_path, CONTEXT)
    assert telling.decode(telling.render(asked)) == "Ann: ?Bob: ?"


def test_a_clients_messages_are_made_plain(text: ModelText) -> None:
    given = [
        {"role": "user", "content": [{"type": "text", "text": "1 + "}, {"type": "text", "text": "1?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{**CALL, "function": {"name": "add", "arguments": "{}"}}],
        },
    ]
    plain = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": {"name": "add", "arguments": {}}}]},
    ]
    assert text.render(given) == text.render(plain)
    with pytest.raises(Refused, match="only text"):
        text.render([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (
            {"role": "usr"},
            "messages[1].role: 'usr' is not known; it must be one of assistant, developer, function, system, tool",
        ),
        ({"content": "x"}, "messages[1].role: missing; it must be one of assistant,"),
        ({"role": ["user"]}, "messages[1].role: ['user'] is not known"),
        ({"role": "user", "content": 5}, "messages[1].content: only text can be read here; leave the rest out"),
        ({"role": "user", "content": {"text": "x"}}, "messages[1].content: only text can be read here; leave"),
        ({"role": "user", "contents": "x"}, "messages[1].content: missing; send what role 'user' says as text"),
        ({"role": "tool", "content": None}, "messages[1].content: missing; send what role 'tool' says as text"),
        ({"role": "assistant", "tool_calls": "add"}, "messages[1].tool_calls[0]: must be {'type': 'function',"),
        ({"role": "assistant", "tool_calls": [{"name": "add"}]}, "messages[1].tool_calls[0]: must be"),
    ],
)  # fmt: skip
def test_a_message_that_cannot_be_read_is_named(text: ModelText, message: Any, says: str) -> None:
    with pytest.raises(Refused) as caught:
        text.render([{"role": "user", "content": "What is 3 + 5?"}, message])
    assert says in caught.value.detail
    assert caught.value.param == says.partition(":")[0]


def test_a_developer_is_a_system_where_the_template_knows_none(text: ModelText, tmp_path: Path) -> None:
    said = [{"role": "developer", "content": "Be short"}, {"role": "user", "content": "What is 3 + 5?"}]
    assert text.render(said) == text.render([{**said[0], "role": "system"}, said[1]])
    (tmp_path / "tokenizer.json").write_bytes((TINY_PATH / "tokenizer.json").read_bytes())
    shown = "{% if m['role'] == 'developer' or m.role in ['ipython'] %}D{{ m.content }}{% endif %}"
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}" + shown + "{% endfor %}")
    own = ModelText(tmp_path, CONTEXT)
    assert own.render([*said, {"role": "ipython", "content": "8"}]) == own.encode("DBe shortD8")
    assert own.render(messages_of(ResponsesBody(model="m", input=said))) == own.encode("DBe short")
    with pytest.raises(Refused, match="one of assistant, developer, function, ipython, system, tool, user"):
        own.render([{"role": "usr", "content": "x"}])
    with pytest.raises(Refused, match="the chat template of this model leaves out what"):
        own.render([said[1], {"role": "system", "content": "x"}])


@pytest.mark.parametrize("inner", ["function", ""])
@pytest.mark.parametrize(
    ("given", "where", "says"),
    [
        ([{"name": "f", "parameters": []}], "tools[0]{}.parameters", "must be a JSON schema of type 'object'"),
        ([{"name": "f", "parameters": {"type": "array"}}], "tools[0]{}.parameters", "must be a JSON schema of type"),
        ([{"name": "f", "description": 5}], "tools[0]{}.description", "must be text"),
        ([{}], "tools[0]{}.name", "missing; it must be 1 to 128 characters of A-Z a-z 0-9 _ - ."),
        ([{"name": "f"}, {"name": "a b"}], "tools[1]{}.name", "'a b' is no name"),
        ([{"name": "f"}, {"name": "f"}], "tools[1]{}.name", "'f' is the name of an earlier tool"),
    ],
)
def test_a_function_that_cannot_be_called_is_named(given: Any, where: str, says: str, inner: str) -> None:
    tools = [{"type": "function", **({inner: function} if inner else function)} for function in given]
    with pytest.raises(Refused) as caught:
        check_tools(tools, inner)
    assert caught.value.param == where.format(f".{inner}" if inner else "")
    assert caught.value.detail.startswith(f"{caught.value.param}: {says}")


@pytest.mark.parametrize(
    ("tool", "says"),
    [
        ({"type": "web_search"}, "tools[0].type: type 'web_search'; only functions can be called here"),
        ({"function": {"name": "f"}}, "tools[0].type: no type; only functions can be called here"),
        ({"type": "function"}, "tools[0].function: must be an object with the function's name"),
        ({"type": "function", "function": ["f"]}, "tools[0].function: must be an object"),
    ],
)
def test_a_tool_that_is_no_function_is_named(tool: Any, says: str) -> None:
    with pytest.raises(Refused) as caught:
        check_tools([tool])
    assert says in caught.value.detail


def test_tools_that_others_send_are_taken() -> None:
    """Those of OpenAI's own helpers, of MCP, and without parameters."""
    check_tools([{"type": "function", "function": {"name": "files.read-1", "strict": True, "parameters": {}}}])
    check_tools([{"type": "function", "function": {"name": "now", "parameters": None}}, *TOOLS])
    check_tools([{"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}], "")


def test_a_template_is_the_models_own(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((TINY_PATH / "tokenizer.json").read_bytes())
    with pytest.raises(Refused, match="no chat template"):
        ModelText(tmp_path, CONTEXT).render(CHATS[0])
    (tmp_path / "chat_template.jinja").write_text(
        "{{ messages[0].content }}{{ raise_exception('no') if tools else '' }}"
    )
    assert ModelText(tmp_path, CONTEXT).render(CHATS[0]) == ModelText(tmp_path, CONTEXT).encode("What is 3 + 5?")
    with pytest.raises(Refused, match="refuses them: no"):
        ModelText(tmp_path, CONTEXT).render(CHATS[0], TOOLS)


#: The second call was cut off by `max_tokens`.
CUT = '<tool_call>{"name": "f"}</tool_call><tool_call>{"na'


@pytest.mark.parametrize(
    ("said", "content", "calls"),
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "", [("add", '{"a": 1}')]),
        (
            'S:\n<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>',
            "S:",
            [("f", "{}"), ("g", "{}")],
        ),
        ("<tool_call>\nnot json\n</tool_call>", "<tool_call>\nnot json\n</tool_call>", []),
        ('<tool_call>\n{"name": "add"', '<tool_call>\n{"name": "add"', []),
        (CUT, CUT, []),
        ('<tool_call>{"name": "f"}', '<tool_call>{"name": "f"}', []),
        ('S:\n<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g"}</tool_call>\nE', "S:\nE",
         [("f", "{}"), ("g", "{}")]),
        ("plain", "plain", []),
    ],
)  # fmt: skip
def test_tool_calls(text: ModelText, said: str, content: str, calls: list[tuple[str, str]]) -> None:
    parsed = parse_calls(said, text.tool_template.source)
    assert parsed.content == content
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in parsed.calls] == calls


@pytest.mark.parametrize("words", ["naïve 日本 😀 end", "a STOP b", "a STO", "x<tool_call>y"])
@pytest.mark.parametrize("stops", [(), ("STOP",), ("zzz", "本")])
def test_text_in_pieces_is_the_whole_text(text: ModelText, words: str, stops: tuple[str, ...]) -> None:
    tokens = text.encode(words)
    cut = min((words.find(stop) for stop in stops if stop in words), default=len(words))
    assert whole_text(text.decode, tokens, stops) == words[:cut]
    stream = TextStream(text.decode, stops)
    pieces = [stream.push([token]) for token in tokens]
    assert "".join(pieces) + stream.end() == words[:cut]
    assert not any("\ufffd" in piece for piece in pieces)


LLAMA = '{{ "parameters" }}{{ tools }}'


@pytest.mark.parametrize(
    ("written", "told", "calls"),
    [
        ('{"name": "add", "parameters": {"a": 1}}', "", ["add"]),
        ('\n {"name": "add", "parameters": {"a": "}{"}}\n', "", ["add"]),
        ('So: {"name": "add", "parameters": {}}', 'So: {"name": "add", "parameters": {}}', []),
        ('{"name": "add"', '{"name": "add"', []),
        ("  ", "  ", []),
        ("plain { text }", "plain { text }", []),
    ],
)
def test_a_stream_finds_the_calls_that_the_whole_answer_has(
    text: ModelText, tmp_path: Path, written: str, told: str, calls: list[str]
) -> None:
    """In Llama's format a call is the whole answer."""
    (tmp_path / "tokenizer.json").write_bytes((TINY_PATH / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(LLAMA)
    llama = ModelText(tmp_path, CONTEXT)
    stream = Form(llama, chat=True, tools=True).stream()
    said = "".join(stream.push([token]) for token in llama.encode(written, special=False))
    parsed = parse_calls(stream.end(), llama.tool_template.source)
    assert said + parsed.content == told
    assert [call["function"]["name"] for call in parsed.calls] == calls
    whole = parse_calls(written, LLAMA).calls
    assert [call["function"] for call in whole] == [call["function"] for call in parsed.calls]


ADD = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (f"Sure.\n{ADD}", "Sure."),
        (f"Sure.\n\n{ADD}\n{ADD}", "Sure.\n"),
        (f"{ADD}\n{ADD}", ""),
        ("a\n\nb\n<tool_call>x", "a\n\nb\n<tool_call>x"),
        ("a\n\nb\n", "a\n\nb\n"),
    ],
)
def test_an_answer_sent_back_extends_what_was_drawn(text: ModelText, written: str, told: str) -> None:
    """The template puts one line break before the call."""
    said = _streamed(text, written)
    assert said.content == told
    question = {"role": "user", "content": "?"}
    answer = {"role": "assistant", "content": said.content, "tool_calls": list(said.calls)}
    drawn = text.encode(written, special=False)
    asked = text.render([question])
    assert text.render([question, answer])[: len(asked) + len(drawn)] == asked + drawn


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (f"Sure.\n{ADD}after", "Sure.after"),
        (f"Sure.\n{ADD}\nafter\n", "Sure.\nafter"),
        (f"{ADD}\n\nbetween\n{ADD}\nafter", "\n\nbetween\nafter"),
        (f"Sure.{ADD}\n\n{ADD}\n\n", "Sure."),
    ],
)
def test_text_behind_a_call_is_the_same_in_a_stream(text: ModelText, written: str, told: str) -> None:
    assert _streamed(text, written).content == told


def _streamed(text: ModelText, written: str) -> Parsed:
    """What a stream has told at its end, which is what the whole answer says."""
    form = Form(text, chat=True, tools=True)
    stream = form.stream()
    said = "".join(stream.push([token]) for token in text.encode(written, special=False))
    rest = form.parsed(stream.end())
    assert said + rest.content == form.parsed(written).content
    return Parsed(said + rest.content, rest.calls)


def test_text_that_is_no_call_is_told_as_it_comes(text: ModelText) -> None:
    stream = TextStream(text.decode, hold="{", alone=True)
    assert [stream.push(text.encode(words)) for words in ("So", ": {", "a}")] == ["So", ": {", "a}"]


# ---- what a tenant may send, or have its model write, to keep the server busy


def test_a_text_that_cannot_fit_is_not_read_to_its_end(text: ModelText, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens would take a few hundred bytes each, before the tenant's money is checked."""
    real, read = ModelText._tokens, list[int]()

    def counted(self: ModelText, words: str, special: bool = False) -> list[int]:
        read.append(len(words))
        return real(self, words, special)

    monkeypatch.setattr(ModelText, "_tokens", counted)
    asks: dict[str, Callable[[str], object]] = {
        "prompt": text.encode,
        "messages": lambda words: text.render([{"role": "user", "content": words}]),
        "input": lambda words: text.render([{"role": "user", "content": words}], field="input"),
    }
    for field, ask in asks.items():
        read.clear()
        with pytest.raises(Refused, match="maximum context length is 2048 tokens") as refused:
            ask("a 1 " * (1 << 20))
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", field)
        assert sum(read) == PIECE


@pytest.mark.parametrize("words", ["the weft " * 400, " " * 3 * PIECE, "a" * 2 * CONTEXT, "a " * 2047])
def test_a_long_text_that_may_fit_has_the_tokenizers_tokens(text: ModelText, words: str) -> None:
    roomy = ModelText(TINY_PATH, CONTEXT if len(words) < PIECE else len(words) // 2 - 1)
    expected = AutoTokenizer.from_pretrained(TINY_PATH)(words)["input_ids"]
    assert roomy.encode(words) == expected


def test_texts_of_one_organisation_wait_for_each_other_and_not_for_others() -> None:
    hold, inside = threading.Event(), threading.Semaphore(0)

    def work() -> bool:
        inside.release()
        return hold.wait(60)

    async def story() -> None:
        asked = [asyncio.ensure_future(in_turn("acme", work)) for _ in range(AT_ONCE + 3)]
        for _ in range(AT_ONCE):
            assert await asyncio.to_thread(inside.acquire, timeout=60)
        assert await in_turn("rival", lambda: "at once") == "at once"
        assert not inside.acquire(blocking=False)
        hold.set()
        assert await asyncio.gather(*asked) == [True] * (AT_ONCE + 3)

    asyncio.run(story())


@pytest.mark.timeout(60, method="signal")
@pytest.mark.parametrize(
    "written",
    ["<tool_call>" + " " * 20_000, "<tool_call>" * 50_000, " <tool_call> x" * 50_000, "</tool_call>" * 50_000],
)
def test_calls_are_looked_for_once_whatever_a_model_has_written(text: ModelText, written: str) -> None:
    """A pattern with three ways to match a space tries all of them: hours for this, with the server waiting."""
    assert parse_calls(written, text.tool_template.source).content == written


def test_what_is_nested_too_deeply_is_no_call(text: ModelText) -> None:
    deep = "[" * 200_000
    said = f"<tool_call>{deep}</tool_call>"
    assert parse_calls(said, text.tool_template.source).content == said
    assert parse_calls(deep, 'llama: "parameters"').content == deep
    call = {"type": "function", "function": {"name": "add", "arguments": deep}}
    assert ModelText(TINY_PATH, 200_000).render([{"role": "assistant", "content": "", "tool_calls": [call]}])


HALF = '{"name": "f", "arguments": {"a": "\\ud83d"}}'


@pytest.mark.parametrize("half", [HALF, HALF.replace('"f"', '"\\ud83d"'), '{"name": "f", "arguments": "\\ud83d"}'])
def test_half_of_a_character_is_no_call(text: ModelText, half: str) -> None:
    """JSON can spell it, but no answer can contain it."""
    said = f"<tool_call>{half}</tool_call>"
    assert parse_calls(said, text.tool_template.source).content == said


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_what_json_has_no_number_for_is_no_call(text: ModelText, number: str) -> None:
    said = f'<tool_call>{{"name": "pay", "arguments": {{"dollars": [{number}]}}}}</tool_call>'
    assert parse_calls(said, text.tool_template.source).content == said


def test_half_of_a_character_has_no_tokens(text: ModelText) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": HALF}}
    with pytest.raises(Refused, match="surrogates not allowed"):
        text.render([{"role": "assistant", "content": "", "tool_calls": [call]}])


@pytest.mark.parametrize("name", ["messages", "tools", "self", "documents", "eos_token"])
def test_options_of_a_template_take_no_other_s_name(text: ModelText, name: str) -> None:
    with pytest.raises(Refused) as refused:
        text.render(CHATS[0], options={name: []})
    field = f"chat_template_kwargs.{name}"
    assert refused.value.detail == f"{field}: a template is given this by the server; leave it out"
    assert refused.value.param == field


@pytest.mark.parametrize(
    ("template", "field", "why"),
    [
        ("{{ 1 / n }}", "chat_template_kwargs", "expects other values; leave out"),
        ("{{ n.a.b if n == 0 }}", "chat_template_kwargs", "expects other values; leave out"),
        ("{{ 'a' * (10 ** 15 if n == 0 else 1) }}", "chat_template_kwargs", "expects other values; leave out"),
        ("{{ raise_exception('no') if n == 0 }}", "chat_template_kwargs", "refuses them: no"),
        ("{{ messages[0].content + 1 }}", "messages", "expects other values; send content as text"),
        ("{{ raise_exception('no') }}", "messages", "refuses them: no"),
    ],
)
def test_what_a_template_fails_of_is_named_in_our_words(tmp_path: Path, template: str, field: str, why: str) -> None:
    """Jinja's own words were passed on, and always as if the messages were wrong."""
    (tmp_path / "tokenizer.json").write_bytes((TINY_PATH / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% set n = n if n is defined else 1 %}" + template)
    text = ModelText(tmp_path, CONTEXT)
    with pytest.raises(Refused) as refused:
        text.render(CHATS[0], options={"n": 0})
    assert refused.value.detail.startswith(f"{field}: the chat template of this model {why}")
    assert refused.value.param == field


def test_what_may_become_a_stop_string_is_not_compared_with_each_of_them() -> None:
    """A stream is written in the event loop, and text as long as a stop string is held back."""
    stops = ("a" * 255 + "z", *(("b" + chr(0x1F300 + number)) * 128 for number in range(63)))
    stream, calls = TextStream(lambda tokens: "a" * len(tokens), stops), 0

    def count(_frame: object, event: str, _about: object) -> None:
        nonlocal calls
        calls += event == "c_call"

    assert [stream.push([0]) for _ in range(300)] == [""] * 255 + ["a"] * 45
    sys.setprofile(count)
    try:
        stream.push([0])
    finally:
        sys.setprofile(None)
    assert calls < 1_000


def test_characters_that_never_end_are_not_decoded_again_and_again() -> None:
    decoded: list[int] = []

    def decode(tokens: Sequence[int]) -> str:
        decoded.append(len(tokens))
        return "\ufffd" * len(tokens)

    stream = TextStream(decode)
    said = "".join(stream.push([token]) for token in range(5_000)) + stream.end()
    assert said == "\ufffd" * 5_000
    assert max(decoded) <= 2 * (PATIENCE + 1)
