"""Requests whose prompts are not computed yet, and which of them the next prefill takes.

A prefill takes at most a budget of prompt tokens, so that running sequences never wait long for their next token; a
longer prompt is computed in pieces of whole blocks, over several steps. Requests start by priority and then in order of
arrival, with two exceptions: a request whose adapter is still being read lets others go first, and one whose next block
of prompt is being computed for another request waits to take it from the prefix cache.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator

from workers.generator.prefix_cache import BLOCK_TOKENS, BlockKey, PrefixCache
from workers.generator.progress import RequestProgress, SequenceProgress


class PrefillQueue:
    def __init__(self, prefix: PrefixCache, budget: int) -> None:
        """`budget`: the most prompt tokens in a prefill; at least one block."""
        self._prefix = prefix
        self._budget = max(budget, BLOCK_TOKENS)
        self._waiting: list[RequestProgress] = []  # in the order they start
        self._begun: list[RequestProgress] = []  # seated, with a part of their prompt computed

    def __bool__(self) -> bool:
        return bool(self._waiting or self._begun)

    @property
    def ready(self) -> bool:
        """Whether any of them can be computed, its adapter having been read."""
        return any(not progress.awaits for progress in self)

    def __iter__(self) -> Iterator[RequestProgress]:
        yield from self._begun
        yield from self._waiting

    def add(self, progress: RequestProgress) -> None:
        insort(self._waiting, progress, key=lambda waiting: -waiting.request.priority)

    def discard(self, progress: RequestProgress) -> None:
        """Take a request out: its prompt is computed, or never will be."""
        if progress in self._begun:
            self._begun.remove(progress)
        elif progress in self._waiting:
            self._waiting.remove(progress)

    def choose(self, seat: Callable[[SequenceProgress], bool]) -> list[RequestProgress]:
        """The requests of the next prefill, each with `goal` set to the position it will reach. Those that start are
        seated by `seat` (False: no memory is free) and get the blocks that the prefix cache has."""
        chosen: list[RequestProgress] = []
        computing: set[BlockKey] = set()
        left = self._budget
        for progress in [progress for progress in self if not progress.awaits]:
            starting = progress.started == 0
            if starting:
                self._look_up(progress)
                if progress.chain.next_key(progress.request.prompt) in computing and progress.may_hit_more:
                    continue
            goal = progress.reach(left)
            if goal == progress.computed:
                break
            if starting and not self._start(progress, seat):
                break
            progress.goal = goal
            left -= goal - progress.computed
            key = progress.chain.next_key(progress.request.prompt)
            if key is not None and self._prefix.capacity:
                computing.add(key)
            chosen.append(progress)
        return chosen

    def save(self, progress: RequestProgress) -> None:
        """Put the blocks that a prefill has computed of this prompt into the prefix cache."""
        self._prefix.save(progress.chain, progress.request.prompt, progress.sequences[0].pages, progress.goal)

    def _look_up(self, progress: RequestProgress) -> None:
        progress.chain, progress.places = self._prefix.match(
            progress.cache_root, progress.request.prompt, progress.hit_limit
        )
        progress.computed = progress.cache_hit = len(progress.places) * BLOCK_TOKENS

    def _start(self, progress: RequestProgress, seat: Callable[[SequenceProgress], bool]) -> bool:
        sequence = progress.sequences[0]
        if not seat(sequence):
            return False
        self._prefix.load(progress.chain, progress.places, sequence.pages)
        progress.started = 1
        self._waiting.remove(progress)
        self._begun.append(progress)
        return True
