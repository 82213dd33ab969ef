"""The stop rule: which condition ends a sequence, and that its tokens are checked as text across token borders."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from transformers import AutoTokenizer

from workers.generator.engine import SamplingParams
from workers.generator.tokens.stop import StopRule, text_decoder
from workers.model.tiny import TINY_PATH

EOS = (0, 9)


#: A special token.
MARK = 1


def spell(tokens: Sequence[int], *, special: bool = True) -> str:
    """Bytes as tokens, so that a character may take several."""
    text = bytes(token for token in tokens if special or token != MARK).decode(errors="replace")
    return text.replace(chr(MARK), "<mark>")


def rule(limit: int = 1000, prompt: Sequence[int] = (), **sampling: object) -> StopRule:
    return StopRule(SamplingParams(**sampling), EOS, limit, spell, prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize("eos", EOS)
def test_eos_stops_by_default(eos: int) -> None:
    assert rule().check([5, eos]) == "stop"
    assert rule(stop_at_eos=False).check([5, eos]) is None


def test_token_ids_stop_beside_or_without_eos() -> None:
    assert rule(stop_token_ids=(7,)).check([5, 7]) == "stop"
    assert rule(stop_token_ids=(7,), stop_at_eos=False).check([7, 0]) is None


def test_length_comes_last() -> None:
    assert rule(limit=2).check([5]) is None
    assert rule(limit=2).check([5, 6]) == "length"
    assert rule(limit=2).check([5, 0]) == "stop"


def test_stop_string_may_span_tokens_and_end_inside_one() -> None:
    stop = rule(stop_strings=("né!",))
    text = list("il est né! oui".encode())
    ends = [n for n in range(1, len(text) + 1) if stop.check(text[:n]) == "stop"]
    assert ends[0] == len("il est né!".encode())


def test_stop_string_is_found_late_in_a_long_text() -> None:
    stop = rule(stop_strings=("END",), limit=100_000)
    assert stop.check(list(b"x" * 5000 + b"EN")) is None
    assert stop.check(list(b"x" * 5000 + b"END")) == "stop"


def test_stop_string_is_found_wherever_it_begins() -> None:
    stop = rule(stop_strings=("END",), limit=100_000)
    for before in range(40):
        assert stop.check(list(b"x" * before + b"EN")) is None
        assert stop.check(list(b"x" * before + b"END")) == "stop"


def test_of_several_stop_strings_the_longest_fits_too() -> None:
    longest = "the whole of it, from here"
    assert rule(stop_strings=("E", longest)).check(list(b"x" * 50 + longest.encode())) == "stop"


def test_text_is_that_of_the_models_tokenizer(tmp_path: Path) -> None:
    known = AutoTokenizer.from_pretrained(TINY_PATH, local_files_only=True)
    tokens = known.encode("3 + 5 = 8<|im_end|>")
    decode = text_decoder(TINY_PATH)
    assert decode is not None
    for _ in range(2):
        assert decode(tokens) == known.decode(tokens) == "3 + 5 = 8<|im_end|>"
        assert decode(tokens, special=False) == "3 + 5 = 8"
    assert text_decoder(tmp_path) is None


def test_window_that_cuts_a_character_does_not_hide_the_string() -> None:
    stop = rule(stop_strings=("é",))
    assert stop.check(list(("ü" * 50 + "é").encode())) == "stop"


@pytest.mark.parametrize("character", ["é", "日", "🧵"])
def test_window_holds_a_stop_string_of_characters_of_many_bytes(character: str) -> None:
    """As many tokens as it has bytes, where each token spells one: far more than it has characters."""
    string = character * 20
    stop, tokens = rule(stop_strings=(string,)), list((" " * 50 + string).encode())
    assert stop.check(tokens) == "stop"
    assert stop.check(tokens[:-1]) is None


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("END", [*b"E", *[MARK] * 9, *b"N", MARK, *b"D"]),
        ("<mark>END", [MARK, *b"END"]),
        ("N<mark>D", [MARK, *b"EN", MARK, *b"D"]),
    ],
)
def test_stop_string_is_found_with_special_tokens_and_without_them(stop: str, text: list[int]) -> None:
    """A text that is read without them is cut at its stop string: what is drawn beyond is billed, and not seen."""
    tokens, held = [*b"x" * 100, *text], rule(stop_strings=(stop,))
    assert next(n for n in range(1, len(tokens) + 1) if held.check(tokens[:n]) == "stop") == len(tokens)


def test_stop_string_is_of_what_is_drawn_behind_the_prompt() -> None:
    """Some tokenizers leave out the space before a word that nothing is before."""

    def words(tokens: Sequence[int], *, special: bool = True) -> str:
        return spell(tokens).removeprefix(" ")

    drawn = StopRule(SamplingParams(stop_strings=(" a",)), EOS, 99, words, list(b"is"))
    assert drawn.check(list(b" a")) == "stop"
    assert rule(prompt=list(b"EN"), stop_strings=("END",)).check(list(b"D")) is None
    assert rule(prompt=list("é".encode()[:1]), stop_strings=("a",)).check(list("é".encode()[1:] + b"a")) == "stop"


MARKED = st.lists(st.one_of(st.text("ab é🧵", max_size=3), st.just(chr(MARK))), max_size=30).map("".join)


@given(MARKED, st.lists(st.text("ab é🧵", min_size=1, max_size=9), min_size=1, max_size=3))
def test_a_text_that_comes_token_by_token_ends_where_the_whole_has_a_stop_string(text: str, stops: list[str]) -> None:
    tokens, watch = list(text.encode()), rule(stop_strings=tuple(stops)).watch()

    def has_one(n: int) -> bool:
        return any(stop in spell(tokens[:n], special=special) for stop in stops for special in (True, False))

    ends = (n for n in range(1, len(tokens) + 1) if watch.check(tokens[:n]) == "stop")
    assert next(ends, None) == next((n for n in range(1, len(tokens) + 1) if has_one(n)), None)


@pytest.mark.parametrize("drawn", [b"a" * 4000, "é".encode()[:1] * 4000, bytes([MARK]) * 4000])
def test_what_a_token_costs_does_not_grow_with_the_stop_strings(drawn: bytes) -> None:
    """All tenants' sequences of an engine are drawn in one loop."""
    read = []

    def counted(tokens: Sequence[int], *, special: bool = True) -> str:
        read.append(len(tokens))
        return spell(tokens, special=special)

    stops = tuple(chr(0x1F300 + number) * 256 for number in range(64))
    watch = StopRule(SamplingParams(stop_strings=stops), EOS, 10_000, counted).watch()
    tokens: list[int] = []
    for token in drawn:
        tokens.append(token)
        assert watch.check(tokens) is None
    assert sum(read) <= 100 * len(drawn)  # of both readings, each with what a token is read behind


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        StopRule(SamplingParams(stop_strings=("x",)), EOS, 10, None)
