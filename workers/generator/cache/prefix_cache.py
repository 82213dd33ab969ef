"""Keys and values of prompts, kept so that later prompts which begin alike need not compute them again.

Only blocks computed by a prefill are kept, never by decoding, because the two round differently; and a prefill computes
a block the same way whatever is computed beside or before it (`workers.generator.forward`). So results are bitwise the
same with a hit and without. Blocks are copied in and out: a sequence owns its pages, so the pool may evict at any time.

A block is `BLOCK_TOKENS` prompt tokens at a multiple of `BLOCK_TOKENS`, after one exact history: a tenant, the
adapter's weights and all tokens before it. Tenants share nothing, for a hit would tell one what another has asked.
Blocks that follow each other form a `Chain`. In a model with recurrent layers a prompt can only continue where their
states are kept, too: at the last block end before the end of each prompt, and every so many blocks that the states
take as much memory as the blocks between them. The index evicts the least recently used block; a use of a block is
followed at once by a use of those before it, so a block always outlives those that follow it.
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from workers.generator.cache.kv_cache import PAGE_TOKENS, KVCache, copy_pages, zeros
from workers.generator.cache.page_groups import Held
from workers.generator.cache.states import KeptStates, States

log = logging.getLogger(__name__)

#: A block is one page of the KV cache.
BLOCK_TOKENS = PAGE_TOKENS

#: Where a chain begins: a tenant, and the number of its weights (`HeldAdapter.weights`; 0: the base model).
Root = tuple[str, int]
#: The key of a block: its predecessor (a root, or the id of the block before) and its tokens.
BlockKey = tuple[Root | int, tuple[int, ...]]


@dataclass
class Chain:
    """The blocks at the head of one prompt, as far as they were found or added."""

    tail: Root | int
    keys: list[BlockKey] = field(default_factory=list)

    def next_key(self, prompt: Sequence[int]) -> BlockKey | None:
        """The key of the next block; None if the prompt has no further whole block."""
        start = len(self.keys) * BLOCK_TOKENS
        tokens = tuple(prompt[start : start + BLOCK_TOKENS])
        return (self.tail, tokens) if len(tokens) == BLOCK_TOKENS else None


class BlockIndex:
    """Which blocks are kept, and where; no tensors here. At most `capacity` blocks, each with a place below that."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._ids = itertools.count(1)
        self._blocks: OrderedDict[BlockKey, tuple[int, int]] = OrderedDict()  # (id, place); oldest use first
        self._free = list(reversed(range(capacity)))

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, root: Root, prompt: Sequence[int], limit: int) -> tuple[Chain, list[int]]:
        """The longest chain of `prompt` within its first `limit` tokens, and the places of its blocks. This does not
        count as a use."""
        chain, places = Chain(root), []
        while (len(chain.keys) + 1) * BLOCK_TOKENS <= limit:
            key = chain.next_key(prompt)
            found = self._blocks.get(key) if key is not None else None
            if key is None or found is None:
                break
            places.append(self._append(chain, key, found))
        return chain, places

    def use(self, chain: Chain) -> None:
        """Mark the blocks of a chain as used now, the first one last."""
        for key in reversed(chain.keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def extend(self, chain: Chain, prompt: Sequence[int]) -> int | None:
        """Add the next block of `prompt` to its chain. Returns the place to fill; None if the block is there already
        or there is no room. A chain that has lost its tail to eviction grows no more."""
        key = chain.next_key(prompt)
        if key is None or (chain.keys and chain.keys[-1] not in self._blocks):
            return None
        self.use(chain)
        found = self._blocks.get(key)
        if found is not None:
            self._append(chain, key, found)
            self.use(chain)
            return None
        place = self._room(chain)
        if place is None:
            return None
        self._blocks[key] = (next(self._ids), place)
        self._append(chain, key, self._blocks[key])
        self.use(chain)
        return place

    def forget(self, keys: Sequence[BlockKey]) -> None:
        """Remove a block that `extend` has added but that was not filled."""
        self._free += [self._blocks.pop(key)[1] for key in keys]

    def _append(self, chain: Chain, key: BlockKey, found: tuple[int, int]) -> int:
        chain.tail = found[0]
        chain.keys.append(key)
        return found[1]

    def _room(self, chain: Chain) -> int | None:
        """A free place, by evicting the least recently used block if necessary; never one of the chain's own."""
        if self._free:
            return self._free.pop()
        oldest = next(iter(self._blocks), None)
        if oldest is None or oldest in chain.keys:
            return None
        return self._blocks.pop(oldest)[1]


class PrefixCache:
    """Keeps blocks in a pool of at most `max_bytes`, beside `cache`. With less than one block's bytes it keeps nothing.
    `state_bytes`: size of a sequence's states, which get up to half of the memory."""

    def __init__(self, cache: KVCache, max_bytes: int, state_bytes: int = 0) -> None:
        block_bytes = cache.groups * sum(pool[0].numel() * pool.element_size() for pool in cache.tensors)
        self._cache = cache
        self._states: KeptStates[BlockKey] | None = None
        if state_bytes:
            self._states = KeptStates(max_bytes // 2 // state_bytes)
            max_bytes = max_bytes - self._states.capacity * state_bytes if self._states.capacity else 0
        self._every = -(-state_bytes // block_bytes)  # blocks between states
        self._index = BlockIndex(max_bytes // block_bytes)
        #: For each of the cache's tensors: the pages of all groups of a block, block after block.
        self._flat = [
            zeros((self._index.capacity * cache.groups, *pool.shape[1:]), pool.dtype, pool.device)
            for pool in cache.tensors
        ]

    @property
    def capacity(self) -> int:
        """The largest number of blocks that the cache keeps."""
        return self._index.capacity

    @property
    def keeps_states(self) -> bool:
        """True if the cache keeps states of recurrent layers: prompts can then continue only at `marks`."""
        return self._states is not None

    def match(self, root: Root, prompt: Sequence[int], limit: int) -> tuple[Chain, list[int]]:
        """The kept blocks at the head of `prompt`, within its first `limit` tokens, for `load`."""
        chain, places = self._index.match(root, prompt, limit)
        while self._states is not None and places and chain.keys[-1] not in self._states:
            chain.tail = chain.keys.pop()[0]
            places.pop()
        return chain, places

    def marks(self, length: int, start: int, stop: int) -> set[int]:
        """The positions, beyond start and up to stop, at which the states of a prompt of that length are kept."""
        if self._states is None or not self.capacity:
            return set()
        last = (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        every = self._every * BLOCK_TOKENS
        regular = range((start // every + 1) * every, stop + 1, every)
        return {*regular, *([last] if start < last <= stop else [])}

    def load(self, chain: Chain, places: Sequence[int], pages: Sequence[Held]) -> States:
        """Copy the blocks that `match` has just found into the first pages of a sequence, as far as it has them.
        Returns the states after them."""
        self._index.use(chain)
        pairs = [
            (self._at(place, group), page)
            for group, held in enumerate(pages)
            for page, place in zip(held.pages, places[held.gone :], strict=False)
        ]
        copy_pages(self._flat, self._cache.tensors, pairs)
        return self._states.use(chain.keys[-1]) if self._states is not None and chain.keys else {}

    def save(
        self,
        chain: Chain,
        prompt: Sequence[int],
        pages: Sequence[Held],
        stop: int,
        states: Mapping[int, States] = MappingProxyType({}),
    ) -> None:
        """Keep the whole blocks within the first `stop` tokens, from the sequence's pages, and those of `states` (by
        position) that lie at `marks`."""
        pairs: list[tuple[int, int]] = []
        new: list[BlockKey] = []
        while (len(chain.keys) + 1) * BLOCK_TOKENS <= stop:
            before = len(chain.keys)
            if any(before < held.gone for held in pages):
                break  # no room for a further block
            place = self._index.extend(chain, prompt)
            if place is not None:
                at = before * BLOCK_TOKENS
                new.append(chain.keys[-1])
                pairs += [(held.of(at), self._at(place, group)) for group, held in enumerate(pages)]
            elif len(chain.keys) == before:
                break
            end = len(chain.keys) * BLOCK_TOKENS
            if self._states is not None and end in self.marks(len(prompt), end - BLOCK_TOKENS, end) and end in states:
                self._states.keep(chain.keys[-1], states[end])
        try:
            copy_pages(self._cache.tensors, self._flat, pairs)
        except Exception as error:  # the prompt is computed all the same
            log.warning("blocks of a prompt could not be kept (%s)", error)
            self._index.forget(new)

    def _at(self, place: int, group: int) -> int:
        """The page of `_flat` for the layers of a group."""
        return place * self._cache.groups + group
