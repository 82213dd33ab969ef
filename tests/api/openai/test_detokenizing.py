"""Turning tokens into text as they come, with a tokenizer like Mistral's: spaces are parts of words, the one before the
first word is left out, and unknown characters become bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models

from api.routes.openai.answers import Form
from api.routes.openai.detokenizing import PATIENCE, Places, TextStream, whole_text
from api.routes.openai.text import ModelText
from tests.search import examples

SPECIAL = ["<unk>", "<s>", "<tool>"]
WORDS = ["▁Paris", "▁a", "<tool>", "▁b", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "▁c", "<tool>", "<tool>", "▁d", "."]
TEXT = "Paris a b😀 c d."


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> Form:
    folder = tmp_path_factory.mktemp("spaces")
    words = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *sorted({*WORDS, "▁"} - {*SPECIAL})]
    vocabulary = {word: token for token, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(SPECIAL)
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    return Form(ModelText(folder, 2048), chat=False)


def ids(form: Form, words: Sequence[str]) -> list[int]:
    found = [form.text._tokenizer.token_to_id(word) for word in words]
    return [token for token in found if token is not None]


@pytest.fixture(scope="module")
def tokens(form: Form) -> list[int]:
    return ids(form, WORDS)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_stream_keeps_the_space_after_a_special_token(form: Form, tokens: list[int], size: int) -> None:
    stream = form.stream()
    parts = [stream.push(tokens[at : at + size]) for at in range(0, len(tokens), size)]
    assert "".join(parts) + stream.end() == whole_text(form.decode, tokens) == form.decode(tokens) == TEXT


@pytest.mark.parametrize("words", ["▁ ▁a", "▁ <tool> ▁a .", "<tool> ▁ ▁ ▁a", "▁ ▁ <tool> ▁"])
def test_spaces_at_the_beginning_are_streamed_but_the_one_that_the_tokenizer_leaves_out(form: Form, words: str) -> None:
    tokens = ids(form, words.split())
    stream = form.stream()
    assert "".join(stream.push([token]) for token in tokens) + stream.end() == form.decode(tokens)
    assert form.decode(tokens).startswith(" ")


def test_many_special_tokens_at_the_beginning_are_not_decoded_again_and_again(form: Form) -> None:
    decoded = list[int]()

    def decode(tokens: Sequence[int]) -> str:
        decoded.append(len(tokens))
        return form.decode(tokens)

    stream = TextStream(decode)
    for _ in range(1000):
        stream.push(ids(form, ["<tool>"]))
    assert max(decoded) <= PATIENCE + 1


def test_every_character_of_many_tokens_is_streamed_whole(form: Form) -> None:
    stream, tokens = form.stream(), ids(form, ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"])
    for _ in range(PATIENCE):
        assert [stream.push([token]) for token in tokens] == ["", "", "", "😀"]
    assert stream.end() == ""


def test_bytes_that_become_no_character_are_given_out_and_not_decoded_again_and_again(form: Form) -> None:
    decoded = list[int]()

    def decode(tokens: Sequence[int]) -> str:
        decoded.append(len(tokens))
        return form.decode(tokens)

    tokens = ids(form, ["<0xF0>"] * 1000)
    stream = TextStream(decode)
    said = "".join(stream.push([token]) for token in tokens)
    assert max(decoded) <= 2 * (PATIENCE + 1)
    assert len(said) >= len(tokens) - PATIENCE
    assert said + stream.end() == form.decode(tokens)


@pytest.mark.parametrize("stop", ["ab", "xyzzy"])
def test_a_stop_string_ends_what_is_kept_back_too(stop: str) -> None:
    """A tool call is held back whole, and the stop string in it may come in pieces, far behind its beginning."""
    pieces = ["hm ", "<ca", "ll>", "a 1 xyz a", stop[:1], stop[1:], " and more"]
    stream = TextStream(lambda tokens: "".join(pieces[token] for token in tokens), ["xyzzy", "ab"], "<call>")
    assert [stream.push([token]) for token in range(len(pieces))] == ["hm ", *[""] * 6]
    assert stream.end() == "<call>" + "".join(pieces[3:6]).partition(stop)[0]


def test_what_may_be_a_call_is_kept_back_only_at_the_beginning() -> None:
    """As in Llama's format, where calls make up the whole answer."""
    call, text = [" ", "\n{", '"name"'], [" ", "see", " {", "x"]
    stream = TextStream(lambda tokens: "".join(call[token] for token in tokens), (), "{", alone=True)
    assert [stream.push([token]) for token in range(3)] == ["", "", ""]
    assert stream.end() == "".join(call)
    stream = TextStream(lambda tokens: "".join(text[token] for token in tokens), (), "{", alone=True)
    assert [stream.push([token]) for token in range(4)] == ["", " see", " {", "x"]
    assert stream.end() == ""


def test_a_token_is_given_with_its_space(form: Form, tokens: list[int]) -> None:
    """Clients join the tokens' texts."""
    spelled = "".join(form.text.word(token) for token in tokens if form.decode([token]) != "")
    assert spelled.replace("\ufffd" * 4, "😀") == " " + TEXT
    read = b"".join(form.text.bytes_of(token) for token in tokens if form.decode([token]) != "")
    assert read.decode() == " " + TEXT
    assert [form.text.word(token) for token in tokens[2:4]] == ["<tool>", " b"]


def test_offsets_are_places_in_the_text_that_is_sent(form: Form, tokens: list[int]) -> None:
    places = form.places().push(tokens)
    assert [TEXT[place:].split(" ")[0] for place in (places[0], places[4], places[12])] == ["Paris", "😀", "."]
    assert places == [0, 5, 7, 7, 9, 9, 9, 9, 10, 12, 12, 12, 14]


@pytest.mark.parametrize(
    ("drawn", "places"),
    [
        ("▁Paris <0xF0> ▁a", [0, 5, 6]),
        ("▁Paris <0xF0> <0x9F> ▁a ▁b", [0, 5, 5, 7, 9]),
        ("<0x80> ▁a <0xF0> <0x9F> <0x98> <0x80> ▁b", [0, 1, 3, 3, 3, 3, 4]),
    ],
)
def test_what_follows_bytes_that_become_no_character_begins_behind_them(
    form: Form, drawn: str, places: list[int]
) -> None:
    assert form.places().push(ids(form, drawn.split())) == places


def test_places_of_bytes_are_those_of_their_characters() -> None:
    places = Places(lambda tokens: bytes(tokens).decode(errors="replace"))
    text = b"a\xf0b\xf0\xe2\x82\xacc\xf0\x9f"
    assert text.decode(errors="replace") == "a\ufffdb\ufffd€c\ufffd"
    assert places.push(list(text)) == [0, 1, 2, 3, 3, 3, 4, 5, 6, 6]


@pytest.mark.parametrize(
    ("prompt", "drawn", "text"),
    [
        ("▁Paris ▁a", "▁b ▁c", " b c"),
        ("▁Paris", ". ▁b", ". b"),
        ("<s>", "▁b", "b"),
        ("▁a <0xF0> <0x9F> <0x98>", "<0x80> ▁b", "\ufffd b"),
    ],
)
def test_a_completion_goes_on_from_its_prompt_as_the_whole_text_does(
    form: Form, prompt: str, drawn: str, text: str
) -> None:
    """Prompt and completion joined are the text of all tokens: the space between them belongs to the completion."""
    read, tokens = ids(form, prompt.split()), ids(form, drawn.split())
    behind = replace(form, before=form.text.context_of(read))
    assert whole_text(behind.decode, tokens, before=behind.before) == text
    stream = behind.stream()
    assert "".join(stream.push([token]) for token in tokens) + stream.end() == text
    if "\ufffd" not in text:
        assert form.decode(read) + text == form.decode([*read, *tokens])
        assert behind.places().push(tokens)[-1] == len(text) - len(form.text.word(tokens[-1])) + (prompt == "<s>")


#: Stop strings are longer than one piece of the stream, so they come in parts.
PIECES = st.lists(st.text("ab🧵", min_size=1, max_size=2), max_size=12)
STOPS = st.lists(st.text("ab🧵", min_size=1, max_size=6), max_size=4)


@settings(max_examples=examples(300))
@given(PIECES, STOPS)
def test_a_stream_gives_out_what_cannot_be_of_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    said, text = "", ""
    stream = TextStream(lambda tokens: "".join(pieces[token] for token in tokens), stops)
    for token, piece in enumerate(pieces):
        said, text = said + stream.push([token]), text + piece
        if any(stop in text for stop in stops):  # a sequence ends at the first
            break
        begun = {size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])}
        assert said == text[: len(text) - max(begun, default=0)]
    cut = min((text.find(stop) for stop in stops if stop in text), default=len(text))
    assert said + stream.end() == text[:cut]
