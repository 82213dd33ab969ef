"""Which pages of the KV cache are taken, and by how many. Pure: numbers only, the tensors are in `kv_cache`."""

from __future__ import annotations

from collections.abc import Sequence

from workers.generator.block_index import BLOCK_TOKENS

#: Positions of a page: a block of the prefix cache is one page.
PAGE_TOKENS = BLOCK_TOKENS


def pages_of(tokens: int) -> int:
    """Pages that so many positions take."""
    return -(-tokens // PAGE_TOKENS)


class PagePool:
    """Pages 0..count-1. One is free again when all its holders have released it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(reversed(range(count)))
        self._holders = [0] * count

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """So many free pages, for one holder. There must be as many."""
        if count > len(self._free):
            raise ValueError(f"{count} pages are asked for, {len(self._free)} of {self.count} are free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> list[int]:
        """One more holder of pages that are taken. They must not be written any more."""
        for page in pages:
            self._holders[page] += 1
        return list(pages)

    def release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)
