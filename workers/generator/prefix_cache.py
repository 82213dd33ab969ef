"""Keys and values of prompts, kept so that later prompts which begin alike need not compute them again.

Only what a prefill computed is kept, never what decoding did, because the two round differently; and a prefill computes
every block alike whatever is computed beside or before it (`workers.generator.forward`). Together that makes results
bitwise the same with a hit and without.

Blocks are copied in and out: a slot of the KV cache owns what it reads, so the pool may evict at any time.

Shapes: K kv heads, D head dim, N blocks of the pool, B block tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from workers.generator.block_index import BLOCK_TOKENS, BlockIndex, Chain, Root
from workers.generator.kv_cache import KVCache, zeros


class PrefixCache:
    """A pool of at most `max_bytes` beside `cache`. With less than one block's bytes it keeps nothing."""

    def __init__(self, cache: KVCache, max_bytes: int) -> None:
        sample = cache.k_SKCD[0]
        _, kv_heads, _, head_dim = sample.shape
        block_bytes = 2 * len(cache.k_SKCD) * kv_heads * BLOCK_TOKENS * head_dim * sample.element_size()
        self._cache = cache
        self._index = BlockIndex(max_bytes // block_bytes)
        shape = (self._index.capacity, kv_heads, BLOCK_TOKENS, head_dim)
        self._pools_NKBD = [zeros(shape, sample.dtype, sample.device) for _ in self._tensors()]

    @property
    def capacity(self) -> int:
        """Most blocks it keeps."""
        return self._index.capacity

    def match(self, root: Root, prompt: Sequence[int], limit: int) -> tuple[Chain, list[int]]:
        """The kept blocks at the head of `prompt`, within its first `limit` tokens, for `load`."""
        return self._index.match(root, prompt, limit)

    def load(self, chain: Chain, places: Sequence[int], slot: int) -> None:
        """Copy the blocks that `match` found, just now, to the head of a slot."""
        self._index.use(chain)
        for cached_SKCD, pool_NKBD in zip(self._tensors(), self._pools_NKBD, strict=True):
            for block, place in enumerate(places):
                start = block * BLOCK_TOKENS
                cached_SKCD[slot, :, start : start + BLOCK_TOKENS] = pool_NKBD[place]

    def save(self, chain: Chain, prompt: Sequence[int], slot: int, stop: int) -> None:
        """Keep the whole blocks among the first `stop` tokens, all of which `slot` holds by now."""
        while (len(chain.keys) + 1) * BLOCK_TOKENS <= stop:
            before, start = len(chain.keys), len(chain.keys) * BLOCK_TOKENS
            place = self._index.extend(chain, prompt)
            if place is not None:
                for cached_SKCD, pool_NKBD in zip(self._tensors(), self._pools_NKBD, strict=True):
                    pool_NKBD[place] = cached_SKCD[slot, :, start : start + BLOCK_TOKENS]
            elif len(chain.keys) == before:
                return

    def _tensors(self) -> list[Tensor]:
        return [*self._cache.k_SKCD, *self._cache.v_SKCD]
