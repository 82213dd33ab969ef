"""Which sequences have rows of the decode step and pages in the KV cache, and which are preempted when either runs out.

A seated sequence holds a row, and pages for its positions so far; it gets another page when it grows into it, so none
is reserved that may never be used. When rows run out, a sequence may be set aside: for one of its own tenant's with a
higher priority, and for one of a tenant that has at least two rows fewer, so that tenants end with equally many, but
nobody swaps places for ever. It keeps its pages until these run out, too; then they are copied out, and back in as soon
as pages are free, so that it continues from the same bits, and so are its states of recurrent layers.

Of all, the sequence set aside is one of the tenant that has the most rows, there of the lowest priority, and the
youngest of those. The first to come back is one of the tenant that has the fewest, and until then none starts that
would not go before it. Of a tenant with several rows, the oldest sequence of its highest priority is never set aside,
and of tenants with one row each not the oldest of all; so some sequence always runs to its end.

Siblings of one request share the whole pages of their prompt. Pages before the windows of their layers (`page_groups`)
are given back, except those from which a sibling has still to start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from workers.generator.cache.kv_cache import PAGE_TOKENS, KVCache, PagePool, Saved, pages_of, routes_of
from workers.generator.cache.page_groups import Held, PageGroup
from workers.generator.cache.states import moved
from workers.generator.engine import GenerateRequest
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
        self._rows = Counter[str]()  # of these, by tenant
        # sequences set aside, with the pages that they keep, or what was copied out of them
        self._paused: dict[SequenceProgress, list[Held]] = {}
        self._out: dict[SequenceProgress, list[tuple[int, Saved]]] = {}

    @property
    def free_rows(self) -> int:
        return self.rows - len(self._seated)

    @property
    def seated(self) -> int:
        return len(self._seated)

    @property
    def aside(self) -> int:
        return len(self._paused) + len(self._out)

    def yields_beside(self, waiting: Collection[str]) -> int:
        """How many rows tenants have beyond one each, if each of those `waiting` gets one, too; no more than may still
        be set aside."""
        return max(0, min(self.seated - len(self._rows.keys() | waiting), self.rows - self.aside))

    @property
    def pages_each(self) -> int:
        """Pages that a sequence takes, on average of those that have any; at least one to start and one to grow."""
        held = max(1, len(self._seated) + len(self._paused))
        return max(2 * len(self._groups), -(-(self.pool.count - self.pool.free) // held))

    @property
    def pages_to_grow(self) -> int:
        """How many pages all seated sequences need to grow: for each sequence one more of each group."""
        return len(self._groups) * len(self._seated)

    def pages_for(self, tokens: int, start: int = 0) -> int:
        """Pages that a prompt takes of which the first `start` tokens are computed."""
        return sum(group.most(start, tokens, self._ahead) for group in self._groups)

    def rows_of(self, tenant: str) -> int:
        return self._rows[tenant]

    def seat(self, sequence: SequenceProgress) -> bool:
        """Give a request's first sequence a row and pages for the prompt, setting others aside if necessary."""
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
        source.states = {}
        self._sit(sequence, self._rise(source))

    def leave(self, sequence: SequenceProgress) -> None:
        """Release all that a sequence holds, seated or set aside."""
        if sequence in self._seated:
            self._free(self._rise(sequence))
        self._free(self._paused.pop(sequence, []))
        self._out.pop(sequence, None)
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
                if not self._paused:
                    self._pause(self._last([s for s in self._seated if s.tokens]))
                self._take_out(self._last(self._paused))
            if sequence in self._seated:
                for held in sequence.pages:
                    held.pages += self.pool.take(1)

    def reach(self, sequence: SequenceProgress, most: int) -> int:
        """How many positions after its newest token a decoding sequence may write to, at most `most` (no more than a
        page has): within its pages, and one further page of each group if no other sequence needs it to grow."""
        room = sequence.pages[0].stop - 1 - sequence.position
        if room < most and not self.aside and self.pool.free >= len(self._groups) + self.pages_to_grow:
            for held in sequence.pages:
                held.pages += self.pool.take(1)
            room += PAGE_TOKENS
        return min(room, most)

    def bring_back(self) -> None:
        """Seat sequences that were set aside while rows and pages are free."""
        while self.aside and self.free_rows:
            sequence = self._first([*self._paused, *self._out])
            if not (self._sit_again(sequence) if sequence in self._paused else self._bring_in(sequence)):
                return

    def clear_after(self, sequence: SequenceProgress) -> None:
        """Wipe everything in a sequence's pages after its newest token."""
        for held in sequence.pages:
            self._cache.clear_from(held.pages, sequence.position + 1 - held.start)

    def clear(self, sequence: SequenceProgress) -> None:
        """Wipe the pages of a sequence with values that are not finite: no mask would hide these."""
        for held in self._held(sequence):
            self._cache.clear(held.pages)

    def routes(self, sequence: SequenceProgress) -> npt.NDArray[np.int64] | None:
        """The experts of all its tokens but the newest; None if it is neither seated nor set aside."""
        if held := self._held(sequence):
            return self._cache.routes(held[0].pages, sequence.position)
        saved = self._out.get(sequence)
        return routes_of(saved[0][1][-1], sequence.position) if saved is not None else None

    def _held(self, sequence: SequenceProgress) -> list[Held]:
        return sequence.pages or self._paused.get(sequence, [])

    def _make_room(self, sequence: SequenceProgress, need: int) -> bool:
        """Free a row and `need` pages for a sequence that starts, if those set aside do not go before it."""
        if self.aside and not self._goes_before_all(sequence):
            return False
        yielding = self._enough(sequence, need)
        if yielding is None:
            return False
        for other in yielding:
            self._pause(other)
        while not self._fits(need):
            self._take_out(self._last(self._paused))
        return True

    def _goes_before_all(self, sequence: SequenceProgress) -> bool:
        rows, mine = self._rows, sequence.owner.request
        for other in (one.owner.request for one in (*self._paused, *self._out)):
            if other.tenant == mine.tenant:
                before = mine.priority > other.priority
            else:
                before = rows[mine.tenant] < rows[other.tenant]
            if not before:
                return False
        return True

    def _enough(self, sequence: SequenceProgress, need: int) -> list[SequenceProgress] | None:
        """Which seated sequences to set aside for this one, so that it has a row, and `need` pages beside those that
        others need to grow; None if there are not enough of them."""
        rows, mine, found = self._rows.copy(), sequence.owner.request, list[SequenceProgress]()
        free = self.pool.free - self.pages_to_grow
        if self.free_rows and free >= need:
            return found
        free += sum(self.pool.alone(held.pages) for pages in self._paused.values() for held in pages)
        left = [seated for seated in self._seated if seated.tokens]
        while not self.free_rows + len(found) or free < need:
            yielding = [one for one in left if _yields(one.owner.request, mine, rows)]
            if not yielding:
                return None
            found.append(self._last(yielding, rows))
            left.remove(found[-1])
            rows[found[-1].owner.request.tenant] -= 1
            free += len(self._groups) + sum(self.pool.alone(held.pages) for held in found[-1].pages)
        return found

    def _last(self, some: Collection[SequenceProgress], rows: Counter[str] | None = None) -> SequenceProgress:
        """Which of these is set aside first; `rows` by tenant, the present ones if None."""
        rows = self._rows if rows is None else rows
        tenant = max(some, key=lambda s: (rows[s.owner.request.tenant], s.owner.number)).owner.request.tenant
        return max((s for s in some if s.owner.request.tenant == tenant), key=_precedence)

    def _first(self, some: Collection[SequenceProgress]) -> SequenceProgress:
        """Which of these comes back first."""
        rows = self._rows
        tenant = min(some, key=lambda s: (rows[s.owner.request.tenant], s.owner.number)).owner.request.tenant
        return min((s for s in some if s.owner.request.tenant == tenant), key=_precedence)

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

    def _pause(self, sequence: SequenceProgress) -> None:
        """Set a sequence aside, with its pages."""
        self._paused[sequence] = self._rise(sequence)
        self.preempted += 1

    def _sit_again(self, sequence: SequenceProgress) -> bool:
        if not self._fits(0):
            return False
        self._sit(sequence, self._paused.pop(sequence))
        return True

    def _take_out(self, sequence: SequenceProgress) -> None:
        """Copy the pages of a paused sequence out, and release them."""
        pages = self._paused[sequence]
        for held in pages:  # pages in reserve that others need more
            needed = pages_of(sequence.position + 1) - held.gone
            self.pool.release(held.pages[needed:])
            del held.pages[needed:]
        try:
            saved = [(held.gone, self._cache.take_out(held.pages)) for held in pages]
            sequence.states = moved(sequence.states, "cpu")
        except Exception as error:
            raise Unmoved(sequence, error) from error
        self._out[sequence] = saved
        self._free(self._paused.pop(sequence))

    def _bring_in(self, sequence: SequenceProgress) -> bool:
        """Seat a sequence whose pages were copied out, if there is room, or others that are set aside make it."""
        whole, saved = pages_of(sequence.position + 1), self._out[sequence]
        while not self._fits(sum(whole - gone for gone, _ in saved)):
            if not (self.free_rows and self._paused):
                return False
            self._take_out(self._last(self._paused))
        brought = [Held(gone, self.pool.take(whole - gone)) for gone, _ in saved]
        try:
            for held, (_, copied) in zip(brought, saved, strict=True):
                self._cache.bring_in(held.pages, copied)
            states = moved(sequence.states, self._cache.device)
        except Exception as error:
            self._free(brought)
            raise Unmoved(sequence, error) from error
        del self._out[sequence]
        sequence.states = states
        self._sit(sequence, brought)
        return True

    def _sit(self, sequence: SequenceProgress, pages: list[Held]) -> None:
        sequence.pages = pages
        self._seated[sequence] = None
        self._rows[sequence.owner.request.tenant] += 1
        self.changes += 1

    def _rise(self, sequence: SequenceProgress) -> list[Held]:
        """Take a sequence's row from it; returns its pages."""
        del self._seated[sequence]
        self._rows -= Counter([sequence.owner.request.tenant])  # keeps no zeros
        pages, sequence.pages = sequence.pages, []
        self.changes += 1
        return pages

    def _free(self, pages: list[Held]) -> None:
        for held in pages:
            self.pool.release(held.pages)


def _precedence(sequence: SequenceProgress) -> tuple[int, int, int]:
    """Sort key within a tenant: by priority, then by age."""
    return *sequence.owner.place, sequence.sample


def _yields(one: GenerateRequest, to: GenerateRequest, rows: Counter[str]) -> bool:
    """Whether a sequence of one request may be set aside for another's, if tenants have so many rows."""
    if one.tenant == to.tenant:
        return one.priority < to.priority
    return rows[one.tenant] >= rows[to.tenant] + 2
