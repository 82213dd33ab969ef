"""Streaming detokenizer: gives out whole characters only, and nothing of a stop string or of text that may become
one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import takewhile

#: A character has at most four tokens. If text has not become whole characters after this many pushes, it is given out
#: as it is; otherwise each push would decode all of it again.
PATIENCE = 16
#: Decodes token ids to text.
Decode = Callable[[Sequence[int]], str]


class TextStream:
    """The text of one sequence, which continues tokens `before`. `stops` end the text and are not part of it. Text from
    `hold` on, and line breaks before it, are kept back until the end; with `alone` only if nothing but space comes
    before it."""

    def __init__(
        self,
        decode: Decode,
        stops: Sequence[str] = (),
        hold: str = "",
        *,
        alone: bool = False,
        before: Sequence[int] = (),
    ) -> None:
        self._decode, self._stops, self._hold = decode, sorted(stop for stop in stops if stop), hold
        self._longest = max(map(len, self._stops), default=0)
        self._alone = alone
        self._tokens = list(before)
        # tokens from _start to _read are only context for decoding the later ones
        self._start, self._read = 0, len(before)
        self._waited = 0  # how many pushes in a row have ended inside of a character
        self.unended = ""  # the text of the tokens of an unfinished character
        self._waiting = ""  # decoded, but not yet given out
        self._over = False

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens; returns the text that is now certain."""
        self._tokens += tokens
        before = self._decode(self._tokens[self._start : self._read])
        text = self._decode(self._tokens[self._start :])
        if text.endswith("\ufffd") and self._waited < PATIENCE:  # an unfinished character
            self._waited, self.unended = self._waited + 1, text[len(before) :]
            return ""
        self._waited, self.unended = 0, ""
        if text == before:  # special tokens only: later tokens are decoded in the context of the words before them
            # at the beginning it may be a space that the tokenizer leaves out
            if self._read or len(self._tokens) > PATIENCE:
                del self._tokens[self._read :]
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return self._take(text[len(before) :])

    def end(self) -> str:
        """The rest of the text, with all that was kept back."""
        before = self._decode(self._tokens[self._start : self._read])
        rest = self._take(self._decode(self._tokens[self._start :])[len(before) :])
        rest, self._waiting = rest + self._waiting, ""
        return rest

    def _take(self, text: str) -> str:
        if self._over:
            return ""
        waiting = self._waiting + text
        first = max(0, len(self._waiting) - self._longest)  # before this no stop string can begin
        cut = min((place for stop in self._stops if (place := waiting.find(stop, first)) >= 0), default=None)
        if cut is not None:
            waiting, self._over = waiting[:cut], True
        if self._alone and (begun := waiting.lstrip()) and not begun.startswith(self._hold):
            self._hold, self._alone = "", False
        if self._alone:
            place = 0
        elif not self._hold or (place := waiting.find(self._hold)) < 0:
            marks = [*([] if self._over else self._stops), *([self._hold] if self._hold else [])]
            place = _begun(waiting, sorted(marks))
        if self._hold:
            place = len(waiting[:place].rstrip("\n"))
        self._waiting = waiting[place:]
        return waiting[:place]


class Places:
    """The offsets, in characters, of a sequence's tokens in its text. All tokens of one character have its offset;
    special tokens that are left out have the offset where the text goes on."""

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        self._text, self._length = TextStream(decode, before=before), 0

    def push(self, tokens: Sequence[int]) -> list[int]:
        """The offsets of the next tokens. Tokens are pushed one by one, so that the offsets do not depend on which came
        together."""
        found = []
        for token in tokens:
            unended = self._text.unended
            said = self._text.push([token])
            stays = takewhile(lambda pair: pair[0] == pair[1], zip(unended, said, strict=False))
            found.append(self._length + len(list(stays)))
            self._length += len(said)
        return found


def _begun(text: str, marks: Sequence[str]) -> int:
    """The position of the longest end of `text` that may begin one of the sorted `marks`; the length of `text` if there
    is none."""
    longest = max(map(len, marks), default=1)
    for place in range(max(0, len(text) - longest + 1), len(text)):
        end = text[place:]
        at = bisect_left(marks, end)  # marks that begin with this end, if any, are next to each other from here on
        if at < len(marks) and marks[at].startswith(end):
            return place
    return len(text)


def whole_text(decode: Decode, tokens: Sequence[int], stops: Sequence[str] = (), before: Sequence[int] = ()) -> str:
    """The text of a sequence that has ended."""
    stream = TextStream(decode, stops, before=before)
    return stream.push(tokens) + stream.end()
