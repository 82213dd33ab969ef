"""Which sequences have pages in the KV cache, and which are preempted when pages run out.

A seated sequence holds a row of the decode step and pages for its positions so far; it gets another page when it grows
into it, so none is reserved that may never be used. When pages run out, the sequence last in precedence (lowest
priority first, then youngest) is set aside: its pages are copied out, and back in as soon as pages are free, so that it
continues from the same bits, and so are its states of recurrent layers. While a sequence is set aside, none of the same
or lower priority starts. The first in precedence is never set aside, so some sequence always runs to its end.

Siblings of one request share the whole pages of their prompt. Pages before the windows of their layers (`page_groups`)
are given back, except those from which a sibling has still to start.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from workers.generator.cache.kv_cache import PAGE_TOKENS, KVCache, PagePool, Saved, pages_of, routes_of
from workers.generator.cache.page_groups import Held, PageGroup
from workers.generator.cache.states import moved
from workers.generator.requests.progress import SequenceProgress


class Unmoved(RuntimeError):
    """The pages of a sequence could not be copied out or in; they are still where they were."""

    def __init__(self, sequence: SequenceProgress, why: Exception) -> None:
        super().__init__(f"pages could not be copied ({type(why).__name__})")
        self.sequence, self.why = sequence, why


class Seating:
    def __init__(self, cache: KVCache, rows: int, groups: Sequence[PageGroup], ahead: int) -> None:
        """At most `rows` sequences are seated at a time. Prompts are computed by at most `ahead` positions at a
        time."""
        self.pool = PagePool(cache.pages)
        self.rows = rows
        self.preempted = 0
        #: Goes up whenever the set of seated sequences changes.
        self.changes = 0
        self._cache, self._groups, self._ahead = cache, groups, ahead
        self._seated: dict[SequenceProgress, None] = {}
        self._aside: dict[SequenceProgress, list[tuple[int, Saved]]] = {}

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
        return max(2 * len(self._groups), -(-(self.pool.count - self.pool.free) // max(1, len(self._seated))))

    @property
    def pages_to_grow(self) -> int:
        """How many pages all seated sequences need to grow: for each sequence one more of each group."""
        return len(self._groups) * len(self._seated)

    def pages_for(self, tokens: int, start: int = 0) -> int:
        """Pages that a prompt takes of which the first `start` tokens are computed."""
        return sum(group.most(start, tokens, self._ahead) for group in self._groups)

    def seat(self, sequence: SequenceProgress) -> bool:
        """Give a request's first sequence pages for the prompt, setting lower priorities aside if necessary."""
        start, tokens = sequence.owner.computed, len(sequence.owner.request.prompt)
        if not self._make_room(sequence, self.pages_for(tokens, start)):
            return False
        counts = [(group.passed(start), group.most(start, tokens, self._ahead)) for group in self._groups]
        self._sit(sequence, [Held(gone, self.pool.take(count)) for gone, count in counts])
        return True

    def advance(self, sequence: SequenceProgress) -> None:
        """A piece of the prompt is computed: pages that no later position reaches are used for the next pieces."""
        self._pass(sequence, sequence.owner.goal, pages_of(len(sequence.owner.request.prompt)))

    def seat_beside(self, sequence: SequenceProgress, source: SequenceProgress) -> bool:
        """Seat a sibling, with the prompt that `source` holds."""
        whole, rest = divmod(len(sequence.owner.request.prompt), PAGE_TOKENS)
        if not self._make_room(sequence, len(self._groups) if rest else 0) or not source.pages:
            return False
        shared = [Held(held.gone, self.pool.share(held.pages[: whole - held.gone])) for held in source.pages]
        if rest:
            for own in shared:
                own.pages += self.pool.take(1)
            ends = zip(shared, source.pages, strict=True)
            try:
                self._cache.copy([(held.pages[whole - held.gone], own.pages[-1]) for own, held in ends])
            except Exception:
                for own in shared:
                    self.pool.release(own.pages)
                raise
        self._sit(sequence, shared)
        return True

    def hand_over(self, source: SequenceProgress, sequence: SequenceProgress) -> None:
        """A sequence has ended: a sibling takes over its row and the pages of the prompt."""
        held, keep = source.pages, pages_of(len(sequence.owner.request.prompt))
        for of in held:
            self.pool.release(of.pages[keep - of.gone :])
            del of.pages[keep - of.gone :]
        del self._seated[source]
        source.pages, source.states = [], {}
        self._sit(sequence, held)

    def leave(self, sequence: SequenceProgress) -> None:
        """Release all that a sequence holds, seated or set aside."""
        if sequence in self._seated:
            self._rise(sequence)
        self._aside.pop(sequence, None)
        sequence.states = {}

    def grow(self) -> None:
        """Give every decoding sequence pages for its next position, setting others aside if necessary."""
        decoding = [sequence for sequence in self._seated if sequence.tokens]
        for sequence in decoding:
            prompt = len(sequence.owner.request.prompt)
            self._pass(sequence, min(sequence.position, prompt) if sequence.owner.unstarted else sequence.position)
        short = [sequence for sequence in decoding if sequence.position >= sequence.pages[0].stop]
        for sequence in sorted(short, key=_precedence):
            while sequence in self._seated and self.pool.free < len(self._groups):
                self._set_aside(max((s for s in self._seated if s.tokens), key=_precedence))
            if sequence in self._seated:
                for held in sequence.pages:
                    held.pages += self.pool.take(1)

    def reach(self, sequence: SequenceProgress, most: int) -> int:
        """How many positions after its newest token a decoding sequence may write to, at most `most` (no more than a
        page has): within its pages, and one further page of each group if no other sequence needs it to grow."""
        room = sequence.pages[0].stop - 1 - sequence.position
        if room < most and not self._aside and self.pool.free >= len(self._groups) + self.pages_to_grow:
            for held in sequence.pages:
                held.pages += self.pool.take(1)
            room += PAGE_TOKENS
        return min(room, most)

    def bring_back(self) -> None:
        """Seat sequences that were set aside, by precedence, while pages are free."""
        for sequence in sorted(self._aside, key=_precedence):
            whole = pages_of(sequence.position + 1)
            if not self._fits(sum(whole - gone for gone, _ in self._aside[sequence])):
                return
            brought = [Held(gone, self.pool.take(whole - gone)) for gone, _ in self._aside[sequence]]
            try:
                for held, (_, saved) in zip(brought, self._aside[sequence], strict=True):
                    self._cache.bring_in(held.pages, saved)
                states = moved(sequence.states, self._cache.device)
            except Exception as error:
                for held in brought:
                    self.pool.release(held.pages)
                raise Unmoved(sequence, error) from error
            del self._aside[sequence]
            sequence.states = states
            self._sit(sequence, brought)

    def clear_after(self, sequence: SequenceProgress) -> None:
        """Wipe everything in a sequence's pages after its newest token."""
        for held in sequence.pages:
            self._cache.clear_from(held.pages, sequence.position + 1 - held.start)

    def clear(self, sequence: SequenceProgress) -> None:
        """Wipe the pages of a sequence with values that are not finite: no mask would hide these."""
        for held in sequence.pages:
            self._cache.clear(held.pages)

    def routes(self, sequence: SequenceProgress) -> npt.NDArray[np.int64] | None:
        """The experts of all its tokens but the newest; None if it is neither seated nor set aside."""
        if sequence in self._seated:
            return self._cache.routes(sequence.pages[0].pages, sequence.position)
        saved = self._aside.get(sequence)
        return routes_of(saved[0][1][-1], sequence.position) if saved is not None else None

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
        """True if a row and `need` pages are free, beside the pages that seated sequences need to grow: otherwise one
        would be set aside at once."""
        return self.free_rows > 0 and self.pool.free >= need + self.pages_to_grow

    def _pass(self, sequence: SequenceProgress, position: int, whole: int = 0) -> None:
        """Give up the pages before the windows of `position`. If pages are missing up to `whole`, these are reused
        behind its last page; the rest is freed."""
        for group, held in zip(self._groups, sequence.pages, strict=True):
            passed = group.passed(position) - held.gone
            if passed > 0:
                old, held.pages, held.gone = held.pages[:passed], held.pages[passed:], held.gone + passed
                again = max(0, whole - held.gone - len(held.pages))
                held.pages += old[:again]
                self.pool.release(old[again:])

    def _set_aside(self, sequence: SequenceProgress) -> None:
        for held in sequence.pages:  # pages in reserve that others need more
            needed = pages_of(sequence.position + 1) - held.gone
            self.pool.release(held.pages[needed:])
            del held.pages[needed:]
        try:
            saved = [(held.gone, self._cache.take_out(held.pages)) for held in sequence.pages]
            sequence.states = moved(sequence.states, "cpu")
        except Exception as error:
            raise Unmoved(sequence, error) from error
        self._aside[sequence] = saved
        self._rise(sequence)
        self.preempted += 1

    def _sit(self, sequence: SequenceProgress, pages: list[Held]) -> None:
        sequence.pages = pages
        self._seated[sequence] = None
        self.changes += 1

    def _rise(self, sequence: SequenceProgress) -> None:
        del self._seated[sequence]
        for held in sequence.pages:
            self.pool.release(held.pages)
        sequence.pages = []
        self.changes += 1


def _precedence(sequence: SequenceProgress) -> tuple[int, int, int]:
    """Sort key: by priority, then by age."""
    return *sequence.owner.place, sequence.sample
