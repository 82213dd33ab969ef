"""What a completion's prompt is in tokens, and where a model's tokenizer is read."""

from __future__ import annotations

import shutil
import threading
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from api.routes.openai.bodies import CompletionBody
from api.routes.openai.chat import prompt_of
from api.routes.openai.text import ModelText, text_of
from tests.api.conftest import MODEL, World
from workers.model.tiny import TINY_PATH


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    """A tokenizer that begins a text with a token of its own, as Llama's does."""
    folder = tmp_path_factory.mktemp("begins")
    shutil.copytree(TINY_PATH, folder, dirs_exist_ok=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin = tokenizer.token_to_id("<|im_start|>")
    tokenizer.post_processor = TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", begin)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return ModelText(folder, 2048)


@pytest.mark.parametrize("given", ["3 + 5", ["3 + 5"]])
def test_the_tokenizers_own_tokens_are_left_out_where_asked_to(text: ModelText, given: str | list[str]) -> None:
    """Who sends a text that begins with them already would have them twice."""
    begin, *rest = prompt_of(CompletionBody(model="m", prompt=given), text)
    assert text.word(begin) == "<|im_start|>"
    assert text.decode(rest) == "3 + 5"
    with_them = CompletionBody(model="m", prompt=given, add_special_tokens=True)
    without = CompletionBody(model="m", prompt=given, add_special_tokens=False)
    for body in (with_them, without):
        body.refuse_unknown()
    assert prompt_of(with_them, text) == [begin, *rest]
    assert prompt_of(without, text) == rest


@pytest.mark.parametrize(
    ("door", "body"),
    [
        ("/v1/completions", {"prompt": [1] * 99}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a b " * 99}]}),
        ("/v1/chat/completions/tokens", {"tokens": [1] * 99}),
        ("/v1/responses", {"input": "a b " * 99}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
def test_a_tokenizer_is_read_beside_the_event_loop(
    world: World, monkeypatch: pytest.MonkeyPatch, door: str, body: dict[str, Any]
) -> None:
    """That of a large model takes a second, in which nobody else would be answered."""
    real, where = ModelText.__init__, list[int]()

    def noted(self: ModelText, *arguments: Any) -> None:
        where.append(threading.get_ident())
        real(self, *arguments)

    monkeypatch.setattr(ModelText, "__init__", noted)
    text_of.cache_clear()
    world.http.post(door, headers={"x-api-key": world.key}, json={"model": MODEL, **body})
    assert where
    assert world.http.portal.call(threading.get_ident) not in where  # type: ignore[union-attr]
