"""Chat templates and tokenizers at the doors are what transformers makes of the same files."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from api.routes.openai.detokenizing import PATIENCE, TextStream, whole_text
from api.routes.openai.errors import Refused
from api.routes.openai.text import AT_ONCE, PIECE, ModelText, in_turn
from api.routes.openai.tools import parse_calls
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
        ("plain", "plain", []),
    ],
)  # fmt: skip
def test_tool_calls(text: ModelText, said: str, content: str, calls: list[tuple[str, str]]) -> None:
    parsed = parse_calls(said, text.template)
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


# ---- what a tenant may send, or have its model write, to keep the server busy


def test_a_text_that_cannot_fit_is_not_read_to_its_end(text: ModelText, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens would take a few hundred bytes each, before anybody has asked whether there is money."""
    real, read = ModelText._tokens, list[int]()

    def counted(self: ModelText, words: str, special: bool = False) -> list[int]:
        read.append(len(words))
        return real(self, words, special)

    monkeypatch.setattr(ModelText, "_tokens", counted)
    for ask in (lambda words: text.encode(words), lambda words: text.render([{"role": "user", "content": words}])):
        read.clear()
        with pytest.raises(Refused, match="maximum context length is 2048 tokens") as refused:
            ask("a 1 " * (1 << 20))
        assert refused.value.code == "context_length_exceeded"
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
    """A pattern with three ways to take a space tries all of them: hours for this, with all of the server waiting."""
    assert parse_calls(written, text.template).content == written


def test_what_is_nested_too_deeply_is_no_call(text: ModelText) -> None:
    deep = "[" * 200_000
    said = f"<tool_call>{deep}</tool_call>"
    assert parse_calls(said, text.template).content == said
    assert parse_calls(deep, 'llama: "parameters"').content == deep
    call = {"type": "function", "function": {"name": "add", "arguments": deep}}
    assert ModelText(TINY_PATH, 200_000).render([{"role": "assistant", "content": "", "tool_calls": [call]}])


HALF = '{"name": "f", "arguments": {"a": "\\ud83d"}}'


@pytest.mark.parametrize("half", [HALF, HALF.replace('"f"', '"\\ud83d"'), '{"name": "f", "arguments": "\\ud83d"}'])
def test_half_of_a_character_is_no_call(text: ModelText, half: str) -> None:
    """JSON can spell it, and no answer can hold it."""
    said = f"<tool_call>{half}</tool_call>"
    assert parse_calls(said, text.template).content == said


def test_half_of_a_character_has_no_tokens(text: ModelText) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": HALF}}
    with pytest.raises(Refused, match="surrogates not allowed"):
        text.render([{"role": "assistant", "content": "", "tool_calls": [call]}])


@pytest.mark.parametrize("name", ["messages", "tools", "self", "documents"])
def test_options_of_a_template_take_no_other_s_name(text: ModelText, name: str) -> None:
    with pytest.raises(Refused, match=f"refuses them: .*'{name}'"):
        text.render(CHATS[0], options={name: []})


def test_characters_that_never_end_are_not_decoded_again_and_again() -> None:
    decoded: list[int] = []

    def decode(tokens: Sequence[int]) -> str:
        decoded.append(len(tokens))
        return "\ufffd" * len(tokens)

    stream = TextStream(decode)
    said = "".join(stream.push([token]) for token in range(5_000)) + stream.end()
    assert said == "\ufffd" * 5_000
    assert max(decoded) <= 2 * (PATIENCE + 1)
