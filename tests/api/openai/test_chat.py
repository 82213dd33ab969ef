"""The tokens of a completion's prompt, and where a model's tokenizer is read."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from api.routes.openai.bodies import ChatBody, ChatTokensBody, CompletionBody, ResponsesBody, Sampling
from api.routes.openai.chat import params_of, prompts_of
from api.routes.openai.models import Target
from api.routes.openai.text import ModelText, text_of
from tests.api.conftest import MODEL, World
from workers.model.card import read_card
from workers.model.tiny import TINY_PATH


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    """A tokenizer that begins each text with a token of its own, as Llama's does."""
    folder = tmp_path_factory.mktemp("begins")
    shutil.copytree(TINY_PATH, folder, dirs_exist_ok=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin = tokenizer.token_to_id("<|im_start|>")
    tokenizer.post_processor = TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", begin)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return ModelText(folder, 2048)


@pytest.mark.parametrize("given", ["3 + 5", ["3 + 5"]])
def test_the_tokenizers_own_tokens_are_left_out_where_asked_to(text: ModelText, given: str | list[str]) -> None:
    """A client whose text begins with them already would have them twice."""
    ((begin, *rest),) = prompts_of(CompletionBody(model="m", prompt=given), text)
    assert text.word(begin) == "<|im_start|>"
    assert text.decode(rest) == "3 + 5"
    with_them = CompletionBody(model="m", prompt=given, add_special_tokens=True)
    without = CompletionBody(model="m", prompt=given, add_special_tokens=False)
    for body in (with_them, without):
        body.refuse_unknown()
    assert prompts_of(with_them, text) == [[begin, *rest]]
    assert prompts_of(without, text) == [rest]


CHAT = ChatBody(model="m", messages=[{"role": "user", "content": "?"}])


@pytest.mark.parametrize(
    ("body", "stop"),
    [
        (CHAT, ["<|endoftext|>", "<|im_end|>"]),
        (ChatTokensBody(model="m", tokens=[1]), ["<|endoftext|>", "<|im_end|>"]),
        (ResponsesBody(model="m", input="?"), ["<|endoftext|>", "<|im_end|>"]),
        (CHAT.model_copy(update={"stop": ["."]}), [".", "<|im_end|>"]),
        (CHAT.model_copy(update={"stop_token_ids": [5]}), ["<|endoftext|>", "<|im_end|>", 5]),
        (CompletionBody(model="m", prompt="?"), None),
    ],
)
def test_a_chat_ends_as_its_template_ends_it_also_where_the_base_model_ends_texts_alone(
    body: Sampling | ResponsesBody, stop: list[str | int] | None
) -> None:
    """A base model that has learned to chat would otherwise write the rest of the conversation, up to max_tokens."""
    card = read_card(MODEL, TINY_PATH)
    text = text_of(card.path, card.context_length)
    known = {word: text.encode(word)[0] for word in ("<|endoftext|>", "<|im_end|>")}
    if stop is not None and not isinstance(body.stop, list):
        stop = sorted(known.get(cast(str, each), each) for each in stop)
    own = Target("m", replace(card, eos_token_ids=(known["<|endoftext|>"],)), *cast(Any, (None, None, ())))
    assert params_of(body, 8, own).stop == stop
    both = replace(own, card=replace(card, eos_token_ids=tuple(known.values())))
    if not body.stop and not body.stop_token_ids:
        assert params_of(body, 8, both).stop is None  # which the model's own end token does


@pytest.mark.parametrize(
    ("behind", "ends"),
    [
        ("<|im_end|>\n{{ '' if add_generation_prompt else '<|endoftext|>' }}", ["<|im_end|>"]),  # Phi-3's
        ("{{ '<|endoftext|>' if loop.last else '<|im_end|>' }}", ["<|endoftext|>"]),  # as gpt-oss's: of the last answer
        ("\n", []),
        ("{{ raise_exception('no') }}", []),
        ("", ["<|im_start|>", "<|endoftext|>"]),  # GLM's: the marks of a user's and of a tool's message
    ],
)
def test_what_ends_an_answer_is_the_first_special_token_behind_it(tmp_path: Path, behind: str, ends: list[str]) -> None:
    (tmp_path / "tokenizer.json").write_bytes((TINY_PATH / "tokenizer.json").read_bytes())
    begins = "{{ '<|endoftext|>' if m.role == 'tool' else '<|im_start|>' }}"
    said = "{% for m in messages %}" + begins + "{{ m.role }}\n{{ m.content }}" + behind + "{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(said)
    found = ModelText(tmp_path, 2048)
    assert [found.word(token) for token in found.ends] == ends


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
    """A large model's tokenizer takes a second to read, in which nobody else would be answered."""
    real, where = ModelText.__init__, list[int]()

    def noted(self: ModelText, *arguments: Any) -> None:
        where.append(threading.get_ident())
        real(self, *arguments)

    monkeypatch.setattr(ModelText, "__init__", noted)
    text_of.cache_clear()
    world.http.post(door, headers={"x-api-key": world.key}, json={"model": MODEL, **body})
    assert where
    assert world.http.portal.call(threading.get_ident) not in where  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("door", "body"), [("chat/completions/tokens", {"tokens": [1]}), ("completions", {"prompt": [1]})]
)
def test_as_many_stops_are_taken_as_the_limit_says_beside_the_models_own_ends(
    world: World, door: str, body: dict[str, Any]
) -> None:
    """Of 63 tokens the refusal said that they were 65, as it had added the model's own ends."""
    card = read_card(MODEL, TINY_PATH)  # a model whose ends are among these tokens
    object.__setattr__(world.service, "cards", {MODEL: card})
    most = world.service.limits.max_stop_sequences
    assert most is not None
    world.service.polls.release()  # an accepted request is answered that the server stops
    asked = {"model": MODEL, "max_tokens": 1} | body

    def answer(**stops: list[Any]) -> tuple[int, str]:
        reply = world.http.post(f"/v1/{door}", headers={"x-api-key": world.key}, json=asked | stops)
        return reply.status_code, reply.json()["error"]["message"]

    for stops in ({"stop_token_ids": [*range(10, 10 + most)]}, {"stop": [f"s{place}" for place in range(most)]}):
        assert answer(**stops)[0] == 503
        ((name, listed),) = stops.items()
        assert answer(**{name: [*listed, type(listed[0])(99)]}) == (
            400,
            f"{name}: {most + 1} entries, the limit is {most}",
        )
