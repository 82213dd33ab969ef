"""Counting requests while they do something."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def counted(counts: Counter[str], key: str) -> Iterator[None]:
    """One more of `key` in `counts`, during the block. Keys without any are not kept."""
    counts[key] += 1
    try:
        yield
    finally:
        counts[key] -= 1
        if not counts[key]:
            del counts[key]
