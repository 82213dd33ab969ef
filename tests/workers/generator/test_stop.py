"""The stop rule: which condition ends a sequence, and that its tokens are checked as text across token borders."""

from collections.abc import Sequence

import pytest

from workers.generator.engine import SamplingParams
from workers.generator.tokens.stop import StopRule

EOS = (0, 9)


def spell(tokens: Sequence[int]) -> str:
    """Bytes as tokens, so that a character may take several."""
    return bytes(tokens).decode(errors="replace")


def rule(limit: int = 1000, **sampling: object) -> StopRule:
    return StopRule(SamplingParams(**sampling), EOS, limit, spell)  # type: ignore[arg-type]


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


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        StopRule(SamplingParams(stop_strings=("x",)), EOS, 10, None)
