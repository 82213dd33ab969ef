"""When a sequence ends: stop tokens, stop strings, and the length. The engine asks once per new token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from workers.generator.engine import SamplingParams, StopReason

#: Extra tokens of the decoded window beyond the longest stop string: a window that starts inside a character or a word
#: may decode its first characters differently.
WINDOW_MARGIN_TOKENS = 8
#: A text that special tokens are left out of lies within as many times the tokens.
LEFT_OUT = 4


class DecodeText(Protocol):
    """Turns token ids into text, with special tokens spelled out, or left out."""

    def __call__(self, tokens: Sequence[int], *, special: bool = True) -> str: ...


class NoTokenizer(ValueError):
    """A request has stop strings, and the model's folder has no tokenizer to decode text with."""


class StopRule:
    """The stop conditions of one request. A new token is checked against token ids first, then the text, then the
    length: a stop token at the last allowed position is a "stop"."""

    def __init__(
        self,
        sampling: SamplingParams,
        eos_token_ids: tuple[int, ...],
        limit: int,
        decode_text: DecodeText | None,
        prompt: Sequence[int] = (),
    ) -> None:
        """`limit` is the most tokens a sequence may have. `decode_text` is needed only with stop strings, and `prompt`
        where the text goes on from it: some tokenizers leave out the space of a text that nothing is before."""
        self.limit = limit
        eos = eos_token_ids if sampling.stop_at_eos else ()
        self._token_ids = frozenset((*eos, *sampling.stop_token_ids))
        self._strings = tuple(text for text in sampling.stop_strings if text)
        if self._strings and decode_text is None:
            raise NoTokenizer("stop strings need a tokenizer, and this model has none: use stop token ids")
        self._decode_text = decode_text
        # Every token spells at least one byte, so a string of n bytes lies within the last n tokens.
        longest = max((len(text.encode()) for text in self._strings), default=0)
        self._window = longest + WINDOW_MARGIN_TOKENS
        self._before = tuple(prompt[-WINDOW_MARGIN_TOKENS:]) if self._strings else ()
        if self._read(self._before, True).endswith("\ufffd"):  # within a character, which the first token ends
            self._before = ()
        self._read_before = {special: len(self._read(self._before, special)) for special in (True, False)}

    def check(self, tokens: Sequence[int]) -> StopReason | None:
        """Why the sequence ends with its newest token, or None. `tokens` are the generated ones, at least one."""
        if tokens[-1] in self._token_ids or self._has_stop_string(tokens):
            return "stop"
        return "length" if len(tokens) >= self.limit else None

    def _has_stop_string(self, tokens: Sequence[int]) -> bool:
        """Of the text with special tokens spelled out, and of that without them: who reads it has either."""
        if not self._strings:
            return False
        texts = (self._text(tokens, self._window, True), self._text(tokens, LEFT_OUT * self._window, False))
        return any(stop in text for stop in self._strings for text in texts)

    def _text(self, tokens: Sequence[int], window: int, special: bool) -> str:
        """Of the last tokens, behind what is before the first."""
        if len(tokens) > window:
            return self._read(tokens[-window:], special)
        return self._read([*self._before, *tokens], special)[self._read_before[special] :]

    def _read(self, tokens: Sequence[int], special: bool) -> str:
        return self._decode_text(tokens, special=special) if tokens and self._decode_text else ""


def text_decoder(model_folder: Path) -> DecodeText | None:
    """A decoder by the model's tokenizer.json, read on first use; None when the model has none."""
    file = model_folder / "tokenizer.json"
    if not file.is_file():
        return None
    loaded: list[Tokenizer] = []

    def decode(tokens: Sequence[int], *, special: bool = True) -> str:
        if not loaded:
            loaded.append(Tokenizer.from_file(str(file)))
        text: str = loaded[0].decode(list(tokens), skip_special_tokens=not special)
        return text

    return decode
