"""Requests whose prompts are not computed yet, and which of them the next prefill takes.

A prefill takes at most a budget of prompt tokens, so that running sequences never wait long for their next token; a
longer prompt is computed in pieces of whole blocks, over several steps. Requests start in order of arrival, where those
of one tenant change places by priority, with three exceptions: a request whose adapter is not there for it yet lets
others go first, one whose next block of prompt is being computed for another request waits to take it from the prefix
cache, and one for which there is no room lets tenants go first that have fewer rows than its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from workers.generator.cache.prefix_cache import BLOCK_TOKENS, PrefixCache
from workers.generator.requests.progress import RequestProgress
from workers.generator.requests.seating import Seating


class PrefillQueue:
    def __init__(self, prefix: PrefixCache, budget: int) -> None:
        """`budget`: the most prompt tokens in a prefill; at least one block."""
        self._prefix = prefix
        self._budget = max(budget, BLOCK_TOKENS)
        self._waiting: list[RequestProgress] = []  # in the order in which they start
        self._begun: list[RequestProgress] = []  # seated, with a part of their prompt computed

    def __bool__(self) -> bool:
        return bool(self._waiting or self._begun)

    @property
    def ready(self) -> bool:
        """True if the prompt of any of the requests can be computed now."""
        return any(progress.ready for progress in self)

    def __iter__(self) -> Iterator[RequestProgress]:
        yield from self._begun
        yield from self._waiting

    def add(self, progress: RequestProgress) -> None:
        waiting, tenant = self._waiting, progress.request.tenant
        waiting.append(progress)
        spots = [spot for spot, each in enumerate(waiting) if each.request.tenant == tenant]
        ordered = sorted((waiting[spot] for spot in spots), key=lambda each: each.place)
        for spot, each in zip(spots, ordered, strict=True):
            waiting[spot] = each

    def discard(self, progress: RequestProgress) -> None:
        """Take a request out: its prompt is computed, or never will be."""
        if progress in self._begun:
            self._begun.remove(progress)
        elif progress in self._waiting:
            self._waiting.remove(progress)

    def choose(self, seating: Seating) -> list[RequestProgress]:
        """The requests of the next prefill, each with `goal` set to the position it will reach. Those that start are
        seated, and get the blocks that the prefix cache has."""
        chosen: list[RequestProgress] = []
        computing: set[Hashable] = set()
        left, fewer = self._budget, float("inf")  # tenants that have fewer rows may still start a request
        for progress in [progress for progress in self if progress.ready]:
            starting = progress.started == 0
            if starting:
                if seating.rows_of(progress.request.tenant) >= fewer:
                    continue
                self._look_up(progress)
                if not computing.isdisjoint(self._wanted(progress)):
                    continue
            goal = progress.reach(left)
            if goal == progress.computed:
                break
            if starting and not self._start(progress, seating):
                fewer = seating.rows_of(progress.request.tenant)
                continue
            progress.goal = goal
            progress.marks = self._marks(progress, goal) | {goal}
            left -= goal - progress.computed
            computing |= self._coming(progress)
            chosen.append(progress)
        return chosen

    def _wanted(self, progress: RequestProgress) -> set[Hashable]:
        """The key of the block that this request would rather take from the prefix cache: another request may be
        computing it."""
        if self._prefix.keeps_states:
            return self._heads(progress, self._marks(progress, progress.hit_limit))
        return {progress.chain.next_key(progress.request.prompt)} if progress.may_hit_more else set()

    def _coming(self, progress: RequestProgress) -> set[Hashable]:
        """Keys of the blocks that the prefix cache will have after this request's prefill."""
        if self._prefix.keeps_states:
            return self._heads(progress, self._marks(progress, progress.goal))
        key = progress.chain.next_key(progress.request.prompt)
        return {key} if key is not None and self._prefix.capacity else set()

    def _marks(self, progress: RequestProgress, stop: int) -> set[int]:
        return self._prefix.marks(len(progress.request.prompt), progress.computed, stop)

    def _heads(self, progress: RequestProgress, marks: set[int]) -> set[Hashable]:
        """The beginnings of the prompt at whose ends states are kept."""
        return {(progress.cache_root, tuple(progress.request.prompt[:mark])) for mark in marks}

    def save(self, progress: RequestProgress) -> None:
        """Put the blocks that a prefill has computed of this prompt into the prefix cache."""
        prompt, pages = progress.request.prompt, progress.sequences[0].pages
        self._prefix.save(progress.chain, prompt, pages, progress.goal, progress.states)
        progress.states = {at: states for at, states in progress.states.items() if at == progress.goal}

    def _look_up(self, progress: RequestProgress) -> None:
        progress.chain, progress.places = self._prefix.match(
            progress.cache_root, progress.request.prompt, progress.hit_limit
        )
        progress.computed = progress.cache_hit = len(progress.places) * BLOCK_TOKENS

    def _start(self, progress: RequestProgress, seating: Seating) -> bool:
        sequence = progress.sequences[0]
        if not seating.seat(sequence):
            return False
        progress.states = {progress.computed: self._prefix.load(progress.chain, progress.places, sequence.pages)}
        progress.started = 1
        self._waiting.remove(progress)
        self._begun.append(progress)
        return True
