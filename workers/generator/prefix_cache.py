"""Keys and values of prompts, kept so that later prompts which begin alike need not compute them again.

Only what a prefill computed is kept, never what decoding did, because the two round differently; and a prefill computes
every block alike whatever is computed beside or before it (`workers.generator.forward`). Together that makes results
bitwise the same with a hit and without.

A block is a page of the KV cache. It is copied in and out: a sequence owns what it reads, so the pool may evict at
any time.

"""

from __future__ import annotations

from collections.abc import Sequence

from workers.generator.block_index import BLOCK_TOKENS, BlockIndex, Chain, Root
from workers.generator.kv_cache import KVCache, zeros


class PrefixCache:
    """A pool of at most `max_bytes` beside `cache`. With less than one block's bytes it keeps nothing."""

    def __init__(self, cache: KVCache, max_bytes: int) -> None:
        block_bytes = sum(pool[0].numel() * pool.element_size() for pool in cache.tensors)
        self._cache = cache
        self._index = BlockIndex(max_bytes // block_bytes)
        self._pools = [
            zeros((self._index.capacity, *pool.shape[1:]), pool.dtype, pool.device) for pool in cache.tensors
        ]

    @property
    def capacity(self) -> int:
        """Most blocks it keeps."""
        return self._index.capacity

    def match(self, root: Root, prompt: Sequence[int], limit: int) -> tuple[Chain, list[int]]:
        """The kept blocks at the head of `prompt`, within its first `limit` tokens, for `load`."""
        return self._index.match(root, prompt, limit)

    def load(self, chain: Chain, places: Sequence[int], pages: Sequence[int]) -> None:
        """Copy the blocks that `match` found, just now, to the first of these pages."""
        self._index.use(chain)
        for cached, pool in zip(self._cache.tensors, self._pools, strict=True):
            for page, place in zip(pages, places, strict=False):
                cached[page] = pool[place]

    def save(self, chain: Chain, prompt: Sequence[int], pages: Sequence[int], stop: int) -> None:
        """Keep the whole blocks among the first `stop` tokens, all of which these pages hold by now."""
        while (len(chain.keys) + 1) * BLOCK_TOKENS <= stop:
            before = len(chain.keys)
            place = self._index.extend(chain, prompt)
            if place is not None:
                for cached, pool in zip(self._cache.tensors, self._pools, strict=True):
                    pool[place] = cached[pages[before]]
            elif len(chain.keys) == before:
                return
