"""When a sequence ends: stop tokens, stop strings, and the length. The engine asks once per new token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer
from weft.wire.binary.sample_codec import StopReason

from workers.generator.engine import SamplingParams

#: With how many of the prompt's last tokens a text is decoded, as context.
BEFORE_TOKENS = 8
#: A character has at most four tokens. If text has not become whole characters after this many tokens, it is read as it
#: is; otherwise every token would decode all of it again.
PATIENCE = 16


class DecodeText(Protocol):
    """Turns token ids into text, with special tokens spelled out, or left out."""

    def __call__(self, tokens: Sequence[int], *, special: bool = True) -> str: ...


class NoTokenizer(ValueError):
    """A request has stop strings, and the model's folder has no tokenizer to decode text with."""


class StopRule:
    """The stop conditions of one request, for each of its sequences. A new token is checked against token ids first,
    then the text, then the length: a stop token at the last allowed position is a "stop"."""

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
        self.token_ids = frozenset((*eos, *sampling.stop_token_ids))
        self.strings = tuple(text for text in sampling.stop_strings if text)
        if self.strings and decode_text is None:
            raise NoTokenizer("stop strings need a tokenizer, and this model has none: use stop token ids")
        self._decode_text = decode_text
        self._before = tuple(prompt[-BEFORE_TOKENS:])

    def watch(self) -> Watch:
        return Watch(self, self._tails())

    def check(self, tokens: Sequence[int]) -> StopReason | None:
        """Why a sequence of these tokens, at least one, has ended; None if it has not."""
        return self.watch().check(tokens)

    def _tails(self) -> list[_Tail]:
        """The tails of the text with special tokens and of the text without them: readers get either."""
        if not self.strings or self._decode_text is None:
            return []
        before = self._before
        if self._decode_text(before).endswith("\ufffd"):  # an unfinished character, which the first token completes
            before = ()
        kept = max(map(len, self.strings)) - 1
        return [_Tail(self._decode_text, special, before, kept) for special in (True, False)]


class Watch:
    """The stop conditions of a request applied to one sequence. It reads each token once, so that the cost of a token
    does not depend on the number of stop strings: all sequences share the step."""

    def __init__(self, rule: StopRule, tails: Sequence[_Tail]) -> None:
        self._rule, self._tails = rule, tails
        self._read = 0

    def check(self, tokens: Sequence[int]) -> StopReason | None:
        """Why the sequence ends with its newest token, or None. `tokens` are all that it has, at least one."""
        new, self._read = tokens[self._read :], len(tokens)
        if tokens[-1] in self._rule.token_ids or self._has_stop_string(new):
            return "stop"
        return "length" if len(tokens) >= self._rule.limit else None

    def _has_stop_string(self, new: Sequence[int]) -> bool:
        texts = [tail.push(new) for tail in self._tails]
        return any(stop in text for stop in self._rule.strings for text in texts)


class _Tail:
    """The end of a growing text: its last `kept` characters, and what was added by the last tokens. Tokens `before` are
    its context, but no part of it."""

    def __init__(self, decode_text: DecodeText, special: bool, before: Sequence[int], kept: int) -> None:
        self._decode_text, self._special, self._kept = decode_text, special, kept
        self._tokens = list(before)  # context tokens, and tokens that are no whole characters yet
        self._context = len(before)
        self._waited = 0  # after how many tokens in a row the text ended inside of a character
        self._text = ""

    def push(self, tokens: Sequence[int]) -> str:
        self._tokens += tokens
        before = self._decode(self._tokens[: self._context])
        text = self._decode(self._tokens)
        found = self._text + text[len(before) :]
        if text.endswith("\ufffd") and self._waited < PATIENCE:
            self._waited += 1
            return found
        self._waited = 0
        if text == before:  # special tokens only: later tokens are decoded in the context of the words before them
            # at the beginning it may be a space that the tokenizer leaves out
            if self._context or len(self._tokens) > PATIENCE:
                del self._tokens[self._context :]
            return found
        del self._tokens[: self._context]
        self._context = len(self._tokens)
        self._text = found[max(0, len(found) - self._kept) :]
        return found

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._decode_text(tokens, special=self._special) if tokens else ""


def text_decoder(model_folder: Path) -> DecodeText | None:
    """A decoder by the model's tokenizer.json, read on first use; None if the model has none."""
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
