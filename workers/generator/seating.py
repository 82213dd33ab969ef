"""Which sequences have pages in the KV cache, and which are preempted when pages run out.

A seated sequence holds a row of the decode step and pages for its positions so far; it gets another page when it grows
into it, so none is reserved that may never be used. When pages run out, the sequence last in precedence (lowest
priority first, then youngest) is set aside: its pages are copied out, and back in as soon as pages are free, so that it
continues from the same bits, and so are its states of recurrent layers. While a sequence is set aside, none of the same
or lower priority starts. The first in precedence is never set aside, so some sequence always runs to its end.

Siblings of one request share the whole pages of their prompt.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from workers.generator.kv_cache import PAGE_TOKENS, KVCache, PagePool, Saved, pages_of, routes_of
from workers.generator.progress import SequenceProgress
from workers.generator.states import moved


class Seating:
    def __init__(self, cache: KVCache, rows: int) -> None:
        """At most `rows` sequences are seated at a time."""
        self.pool = PagePool(cache.pages)
        self.rows = rows
        self.preempted = 0
        #: Goes up whenever the set of seated sequences changes.
        self.changes = 0
        self._cache = cache
        self._seated: dict[SequenceProgress, None] = {}
        self._aside: dict[SequenceProgress, Saved] = {}

    @property
    def free_rows(self) -> int:
        return self.rows - len(self._seated)

    @property
    def seated(self) -> int:
        return len(self._seated)

    @property
    def aside(self) -> int:
        return len(self._aside)

    @property
    def pages_each(self) -> int:
        """Pages that a sequence takes, estimated from the seated ones; at least one to start and one to grow."""
        return max(2, -(-(self.pool.count - self.pool.free) // max(1, len(self._seated))))

    def seat(self, sequence: SequenceProgress) -> bool:
        """Give a request's first sequence pages for the prompt, setting lower priorities aside if necessary."""
        need = pages_of(len(sequence.owner.request.prompt))
        if not self._make_room(sequence, need):
            return False
        self._sit(sequence, self.pool.take(need))
        return True

    def seat_beside(self, sequence: SequenceProgress, source: SequenceProgress) -> bool:
        """Seat a sibling, with the prompt that `source` holds."""
        whole, rest = divmod(len(sequence.owner.request.prompt), PAGE_TOKENS)
        if not self._make_room(sequence, 1 if rest else 0) or not source.pages:
            return False
        pages = self.pool.share(source.pages[:whole])
        if rest:
            pages += self.pool.take(1)
            self._cache.copy_page(source.pages[whole], pages[whole])
        self._sit(sequence, pages)
        return True

    def hand_over(self, source: SequenceProgress, sequence: SequenceProgress) -> None:
        """A sequence has ended: a sibling takes over its row and the pages of the prompt."""
        pages, keep = source.pages, pages_of(len(sequence.owner.request.prompt))
        self.pool.release(pages[keep:])
        del self._seated[source]
        source.pages, source.states = [], {}
        self._sit(sequence, pages[:keep])

    def leave(self, sequence: SequenceProgress) -> None:
        """Release all that a sequence holds, seated or set aside."""
        if sequence in self._seated:
            self._rise(sequence)
        self._aside.pop(sequence, None)
        sequence.states = {}

    def grow(self) -> None:
        """Give every decoding sequence a page for its next position, setting others aside if necessary."""
        short = [s for s in self._seated if s.tokens and s.position >= len(s.pages) * PAGE_TOKENS]
        for sequence in sorted(short, key=_precedence):
            while sequence in self._seated and not self.pool.free:
                self._set_aside(max((s for s in self._seated if s.tokens), key=_precedence))
            if sequence in self._seated:
                sequence.pages += self.pool.take(1)

    def bring_back(self) -> None:
        """Seat sequences that were set aside, by precedence, while pages are free."""
        for sequence in sorted(self._aside, key=_precedence):
            need = pages_of(sequence.position + 1)
            if not self._fits(need):
                return
            pages = self.pool.take(need)
            self._cache.bring_in(pages, self._aside.pop(sequence))
            sequence.states = moved(sequence.states, self._cache.device)
            self._sit(sequence, pages)

    def clear(self, sequence: SequenceProgress) -> None:
        """Wipe the pages of a sequence with values that are not finite, which no mask would hide."""
        if sequence.pages:
            self._cache.clear(sequence.pages)

    def routes(self, sequence: SequenceProgress) -> npt.NDArray[np.int64] | None:
        """The experts that its tokens but the newest were routed to; None if it is neither seated nor set aside."""
        if sequence in self._seated:
            return self._cache.routes(sequence.pages, sequence.position)
        saved = self._aside.get(sequence)
        return routes_of(saved[-1], sequence.position) if saved is not None else None

    def _make_room(self, sequence: SequenceProgress, need: int) -> bool:
        priority = sequence.owner.request.priority
        if any(other.owner.request.priority >= priority for other in self._aside):
            return False
        while not self._fits(need):
            lower = [s for s in self._seated if s.tokens and s.owner.request.priority < priority]
            if not lower:
                return False
            self._set_aside(max(lower, key=_precedence))
        return True

    def _fits(self, need: int) -> bool:
        """Whether a row and `need` pages are free, and one more page per seated sequence, lest one is set aside at
        once."""
        return self.free_rows > 0 and self.pool.free >= need + len(self._seated)

    def _set_aside(self, sequence: SequenceProgress) -> None:
        self._aside[sequence] = self._cache.take_out(sequence.pages)
        sequence.states = moved(sequence.states, "cpu")
        self._rise(sequence)
        self.preempted += 1

    def _sit(self, sequence: SequenceProgress, pages: list[int]) -> None:
        sequence.pages = pages
        self._seated[sequence] = None
        self.changes += 1

    def _rise(self, sequence: SequenceProgress) -> None:
        del self._seated[sequence]
        self.pool.release(sequence.pages)
        sequence.pages = []
        self.changes += 1


def _precedence(sequence: SequenceProgress) -> tuple[int, int, int]:
    """Sort key: by priority, then by age."""
    return -sequence.owner.request.priority, sequence.owner.number, sequence.sample
