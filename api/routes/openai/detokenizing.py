"""Tokens to text as they come: whole characters only, and nothing of a stop string, nor of what may become one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import takewhile

#: A character has at most four tokens. What has not become one after so many pushes is given out as it is; otherwise
#: each push would have all of it decoded again.
PATIENCE = 16
#: Turns token ids into text.
Decode = Callable[[Sequence[int]], str]


class TextStream:
    """The text of one sequence, which goes on from tokens `before`. `stops` end it and are left out; text from `hold`
    on is kept back until the end, with `alone` only where nothing but space is before it."""

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
        self._start, self._read = 0, len(before)  # tokens from _start to _read are the context of those behind
        self._waited = 0  # pushes in a row that ended within a character
        self.unended = ""  # how what they have drawn reads so far
        self._waiting = ""  # decoded and not given out
        self._over = False

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens make certain."""
        self._tokens += tokens
        before = self._decode(self._tokens[self._start : self._read])
        text = self._decode(self._tokens[self._start :])
        if text.endswith("\ufffd") and self._waited < PATIENCE:  # a character that has not ended
            self._waited, self.unended = self._waited + 1, text[len(before) :]
            return ""
        self._waited, self.unended = 0, ""
        if text == before:  # special tokens: what comes next is read behind the words before them
            if self._read or len(self._tokens) > PATIENCE:  # at the beginning it may be a space that is left out
                del self._tokens[self._read :]
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return self._take(text[len(before) :])

    def end(self) -> str:
        """All that was kept back."""
        before = self._decode(self._tokens[self._start : self._read])
        rest = self._take(self._decode(self._tokens[self._start :])[len(before) :])
        rest, self._waiting = rest + self._waiting, ""
        return rest

    def _take(self, text: str) -> str:
        if self._over:
            return ""
        waiting = self._waiting + text
        first = max(0, len(self._waiting) - self._longest)  # no stop string lies before
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
        self._waiting = waiting[place:]
        return waiting[:place]


class Places:
    """Where tokens begin in the text of their sequence, in characters. Parts of a character begin where it does, what
    follows bytes that become none begins behind them, and special tokens that are left out begin where the text goes
    on."""

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        self._text, self._length = TextStream(decode, before=before), 0

    def push(self, tokens: Sequence[int]) -> list[int]:
        """The places of the next tokens. Each by itself, so that they do not hang on what came together."""
        found = []
        for token in tokens:
            unended = self._text.unended
            said = self._text.push([token])
            stays = takewhile(lambda pair: pair[0] == pair[1], zip(unended, said, strict=False))
            found.append(self._length + len(list(stays)))
            self._length += len(said)
        return found


def _begun(text: str, marks: Sequence[str]) -> int:
    """Where the end of `text` begins that may be the beginning of one of `marks`, which are sorted."""
    longest = max(map(len, marks), default=1)
    for place in range(max(0, len(text) - longest + 1), len(text)):
        end = text[place:]
        at = bisect_left(marks, end)  # those that begin with it, if any, are together from here on
        if at < len(marks) and marks[at].startswith(end):
            return place
    return len(text)


def whole_text(decode: Decode, tokens: Sequence[int], stops: Sequence[str] = (), before: Sequence[int] = ()) -> str:
    """The text of a sequence that has ended."""
    stream = TextStream(decode, stops, before=before)
    return stream.push(tokens) + stream.end()
