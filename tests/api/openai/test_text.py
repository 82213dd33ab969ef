"""Chat templates and tokenizers at the doors are what transformers makes of the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from api.routes.openai.detokenizing import TextStream, whole_text
from api.routes.openai.errors import Refused
from api.routes.openai.text import ModelText
from api.routes.openai.tools import parse_calls
from workers.model.tiny import TINY_PATH

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
    return ModelText(TINY_PATH)


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("messages", CHATS)
def test_renders_as_transformers_does(text: ModelText, messages: Any, tools: Any) -> None:
    theirs = AutoTokenizer.from_pretrained(TINY_PATH)
    for more in ({}, {"enable_thinking": False}):
        expected = theirs.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, return_dict=False, **more
        )
        assert text.render(messages, tools, **more) == expected
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
        ModelText(tmp_path).render(CHATS[0])
    (tmp_path / "chat_template.jinja").write_text(
        "{{ messages[0].content }}{{ raise_exception('no') if tools else '' }}"
    )
    assert ModelText(tmp_path).render(CHATS[0]) == ModelText(tmp_path).encode("What is 3 + 5?")
    with pytest.raises(Refused, match="refuses them: no"):
        ModelText(tmp_path).render(CHATS[0], TOOLS)


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
